"""What a run needs before it is launched: bytes, FLOPs and collectives of the real step, from shapes alone."""
