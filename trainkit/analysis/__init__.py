"""Afterwards: what the CSVs of many runs show together.

`comparison` reads them and computes speedup and efficiency, `trust` says which of these to doubt, `sizes`
from how much data on more devices pay, `verdict` puts it into words, `figures` draws it, and `report` puts
all on the terminal and into a folder. From the rest of trainkit they need only records and errors.
"""
