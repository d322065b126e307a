"""Display of checkpoints and reports: as facts, and as HTML in notebooks."""
