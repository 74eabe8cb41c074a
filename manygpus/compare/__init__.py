"""What the records of many runs show together."""
