"""The exercises of the workshop: their list, their checks, and what a check may look at."""
