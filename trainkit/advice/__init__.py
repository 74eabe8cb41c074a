"""How many GPUs to ask for, from measured runs."""
