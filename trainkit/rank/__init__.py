"""The training itself, as each rank runs it: data, batches, network, optimizer, checkpoints, the record."""
