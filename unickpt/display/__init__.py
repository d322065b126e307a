"""What people are shown of checkpoints and reports: as facts, and as HTML in notebooks."""
