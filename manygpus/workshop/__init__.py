"""The exercises: the list, their checks, hints and solutions."""
