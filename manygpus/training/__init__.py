"""The loop around the training step, and what it measures."""
