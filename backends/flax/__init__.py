"""Files of Flax."""
