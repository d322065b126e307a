"""torch's distributed checkpoints (DCP)."""
