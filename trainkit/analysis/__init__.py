"""Afterwards: what the CSVs of many runs show together.

`comparison` reads them and computes speedup and efficiency, `figures` draws them, and `report` puts both
on the terminal and into a folder. From the rest of trainkit they need only records and errors.
"""
