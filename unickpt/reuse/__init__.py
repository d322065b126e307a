"""What a save need not write: chunks that an earlier checkpoint has."""
