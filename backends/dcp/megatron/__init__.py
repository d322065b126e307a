"""Megatron-Core's distributed checkpoints (torch_dist)."""
