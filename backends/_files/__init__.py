"""Shared by readers and writers of other systems: pickles, zip files, choice of files, names."""
