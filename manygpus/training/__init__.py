"""What surrounds the training step."""
