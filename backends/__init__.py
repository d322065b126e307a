"""Storage schemes, one module each; only `unickpt.storage.schemes` imports them, by name."""
