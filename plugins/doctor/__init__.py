"""What an installation of unickpt has and what a path supports: the command `unickpt doctor`."""
