"""Loads a checkpoint into a requested tree."""
