"""Data sets, and the loaders that cut their batches for the ranks."""
