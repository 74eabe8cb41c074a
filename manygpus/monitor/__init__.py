"""What a job does with its GPUs, cores and memory: samples, and the verdict on them."""
