"""The version of the library: here, because asking the installed package takes 20 ms."""

__version__ = "0.1.0"  # a literal: pyproject.toml takes it from here without importing anything

LIBRARY = f"unickpt {__version__}"
