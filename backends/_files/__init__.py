"""What several formats of others have in common: pickles, zip files, which files, names."""
