"""References to chunks that a save need not write, because an earlier checkpoint has them."""
