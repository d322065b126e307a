"""The checkpoints of a run, and how far those are that are being saved: `unickpt watch`."""
