"""The Checkpointer: the steps of a training run."""
