"""Whether a job can work here, before any training."""
