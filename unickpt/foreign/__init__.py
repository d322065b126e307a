"""What readers of other systems' checkpoints need: the registry, files, ranges, pickles."""
