"""What runs a training: processes that find each other, their devices, their machine, how they end."""
