"""Whether a job can work on this cluster, seen before any training."""
