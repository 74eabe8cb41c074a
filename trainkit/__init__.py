"""The code that all stages share; README.md describes its packages."""
