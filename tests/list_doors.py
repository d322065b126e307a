"""Writes unickpt/_doors.py from the entry points in pyproject.toml; with --check, compares them.

python tests/list_doors.py            # what `make doors` runs
python tests/list_doors.py --check    # what `make lint` runs
"""

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "unickpt" / "_doors.py"


def source() -> str:
    """What the module has to be."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [
        '"""The entry points of unickpt itself; `make doors` makes this of pyproject.toml."""',
        "",
        "DOORS = {",
    ]
    for group, entries in project["entry-points"].items():
        if not group.startswith("unickpt."):  # a door of another package, such as vLLM's
            continue
        lines.append(f'    "{group.removeprefix("unickpt.")}": {{')
        lines += [f'        "{name}": "{target}",' for name, target in entries.items()]
        lines.append("    },")
    return "\n".join([*lines, "}", ""])


def main() -> None:
    if sys.argv[1:] != ["--check"]:
        FILE.write_text(source())
    elif FILE.read_text() != source():
        sys.exit(f"{FILE} is not what pyproject.toml says: run `make doors`")


if __name__ == "__main__":
    main()
