"""Features beyond the core, one folder each, behind the seams of `unickpt.extend`."""
