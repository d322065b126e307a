"""Merges the output of all processes into one checkpoint that appears atomically."""
