"""Models in GGUF."""
