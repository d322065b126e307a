"""Storage schemes, one module each, which registers itself with `unickpt.storage.schemes`.

Nothing imports them by name but that registry.
"""
