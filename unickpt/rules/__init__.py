"""Rules: one notation that relates names and axes of two sides, both ways (docs/rules.md)."""
