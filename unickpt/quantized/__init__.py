"""Arrays of floats stored with fewer bits than they have: how a chunk becomes bytes, and back."""
