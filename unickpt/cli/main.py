"""The command line `unickpt inspect | ls | verify | ...`; see `app`."""

from __future__ import annotations

import io
import os
import sys


def main() -> None:
    """Runs the command line, or reports what to install if the extra `cli` is missing."""
    try:
        from unickpt.cli.app import app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("typer", "rich"):
            raise
        print(
            f"unickpt: the command line needs {error.name}; pip install 'unickpt[cli]'",
            file=sys.stderr,
        )
        sys.exit(2)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the parent process
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # until the process ends
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names may not fit a narrow encoding
    app(prog_name="unickpt")


if __name__ == "__main__":
    main()
