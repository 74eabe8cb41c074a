"""Who this process is, and how it meets and talks to the others."""
