"""How this process meets and talks to the others."""
