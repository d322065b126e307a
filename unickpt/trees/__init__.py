"""Nested containers and the names of their leaves; plain values."""
