"""The record of a training: its columns, how it is written and read back."""
