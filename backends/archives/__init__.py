"""Checkpoints in archives."""
