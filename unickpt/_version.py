"""The version of the library, from the installed package's metadata."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("unickpt")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"

LIBRARY = f"unickpt {__version__}"
