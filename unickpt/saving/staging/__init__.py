"""Staging for asynchronous saves: keeps the state as it was at the call until it is written."""
