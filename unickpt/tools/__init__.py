"""Convert, copy and compare checkpoints."""
