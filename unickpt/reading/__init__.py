"""Opens checkpoints, and reads boxes of their arrays."""
