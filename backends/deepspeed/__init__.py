"""DeepSpeed's checkpoints, and its universal checkpoints."""
