"""Plain pickles."""
