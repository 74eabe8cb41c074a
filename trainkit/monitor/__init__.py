"""What a job does with its GPUs, cores and memory: sampled, judged, drawn."""
