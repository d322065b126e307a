"""What trainers of others go on from: only written, other formats read it."""
