"""The effectful rim: the loop, checkpoints, metrics and validation."""
