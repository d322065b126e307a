"""Files that trainers resume from: only written here; other formats read them."""
