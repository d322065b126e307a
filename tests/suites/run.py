"""Runs a trainer's own tests of checkpoints with its own implementation and with ours.

    python tests/suites/run.py keras ~/keras
    python tests/suites/run.py keras ~/keras -- -k save_freq -x

The checkout is of the version that the module of the suite names (`tests/suites/keras.py`), and so
is the package that is installed. Prints the tests that pass with theirs and fail with ours, each
with its reason; ends with 1 if one has none.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
NAMES = sorted({p.stem for p in HERE.glob("[a-z]*.py")} - {"run", "recording"})


def outcomes(name: str, checkout: Path, ours: bool, more: list[str]) -> dict[str, str]:
    """How each test ended."""
    suite = importlib.import_module(f"suites.{name}")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "outcomes")
        out.touch()
        paths = [str(HERE.parent), str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "UNICKPT_SUITE": name,
            "UNICKPT_SUITE_OURS": str(int(ours)),
            "UNICKPT_SUITE_OUT": str(out),
        }
        command = [sys.executable, "-m", "pytest", "-p", "suites.recording", "-q", "--no-header"]
        command += ["-p", "no:cacheprovider", "-p", "no:warnings", *getattr(suite, "OPTIONS", ())]
        command += [*more, *suite.FILES]
        subprocess.run(command, cwd=checkout, env=environment, check=False)
        return dict(json.loads(line) for line in out.read_text().splitlines())


def reason_of(test: str, reasons: dict[str, str]) -> str | None:
    """Why a test does not pass, by the first of the patterns that fits its name."""
    return next((why for glob, why in reasons.items() if fnmatch.fnmatchcase(test, glob)), None)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("suite", choices=NAMES)
    parser.add_argument("checkout", type=Path, help="of the trainer's repository")
    parser.add_argument("more", nargs="*", help="arguments of pytest, after --")
    arguments = parser.parse_args()
    sys.path[0] = str(HERE.parent)  # not this folder, whose modules are called as the trainers
    reasons = importlib.import_module(f"suites.{arguments.suite}").REASONS
    run = arguments.suite, arguments.checkout
    theirs, ours = (outcomes(*run, each, arguments.more) for each in (False, True))
    passed = [test for test, outcome in theirs.items() if outcome == "passed"]
    print(f"\n{arguments.suite}: with theirs {dict(Counter(theirs.values()))}, ", end="")
    print(f"with ours {dict(Counter(ours.values()))}")
    lost = {t: reason_of(t, reasons) for t in passed if ours.get(t) != "passed"}
    print(f"{len(passed) - len(lost)} of {len(passed)} that pass with theirs pass with ours")
    for test, why in lost.items():
        print(f"  {test}: {ours.get(test, 'no outcome')}: {why or 'UNEXPLAINED'}")
    unused = [glob for glob in reasons if not any(fnmatch.fnmatchcase(t, glob) for t in lost)]
    if unused and not arguments.more:
        print("reasons that explain nothing:", *unused)
    return int(None in lost.values())


if __name__ == "__main__":
    sys.exit(main())
