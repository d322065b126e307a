"""Storage schemes, one module each."""
