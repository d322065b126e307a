"""Loads a checkpoint into what is requested."""
