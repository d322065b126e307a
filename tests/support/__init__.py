"""What tests share."""

from pathlib import Path

TESTS = str(Path(__file__).parents[1])
"""The folder of all tests."""
