"""How many GPUs to ask for."""
