"""The command `unickpt doctor`: examines an installation of unickpt, and a path."""
