"""The options of a training, and what all command lines share."""
