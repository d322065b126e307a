"""A run, or one checkpoint, as a page for browsers: facts from the storage, and one HTML file."""
