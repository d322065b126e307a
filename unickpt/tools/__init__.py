"""Convert, export, copy, merge, compare and verify checkpoints."""
