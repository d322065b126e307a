"""convert, diff and verify."""
