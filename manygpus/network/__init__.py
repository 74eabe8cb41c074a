"""The networks and optimizers of the course, and what identifies those of any training."""
