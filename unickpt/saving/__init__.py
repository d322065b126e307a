"""Describes a tree, plans who writes what, stages and writes it."""
