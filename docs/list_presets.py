"""Writes the tables of docs/presets.md: `python docs/list_presets.py`.

They come from the comments at the head of each preset: the first sentence says what it maps, and
lines such as `# Checked: ...` fill the other columns.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRESETS = ROOT / "unickpt" / "rules" / "presets"
PAGE = ROOT / "docs" / "presets.md"
BEGIN, END = "<!-- presets -->\n", "<!-- end of presets -->\n"

GROUPS = {
    "transformers-": "Flax and PyTorch classes of transformers",
    "transformers5-": "Files on the Hub and modules of transformers 5",
    "maxtext-": "MaxText and Hugging Face",
    "litgpt-": "LitGPT and Hugging Face",
    "torchtitan-": "torchtitan and Hugging Face",
}
TAG = re.compile(
    r"^# (Checked|Sizes|Sizes from the right|Sizes from the left|Not exact|Left out): (.*)$"
)


def comments(name: str) -> tuple[str, dict[str, str]]:
    """What a preset maps, and what its other comments say of it."""
    text, tags = [], {}
    for line in (PRESETS / f"{name}.rules").read_text().splitlines():
        if not line.startswith("#"):
            break
        if found := TAG.match(line):
            tags[found[1]] = found[2]
        else:
            text.append(line.lstrip("# "))
    return " ".join(text).partition(". ")[0].rstrip("."), tags


def sizes(tags: dict[str, str]) -> str:
    """The sizes that a preset asks for."""
    whole = [f"`{tags['Sizes']}`"] if "Sizes" in tags else []
    sides = {side: tags.get(f"Sizes from the {side}") for side in ("right", "left")}
    return "; ".join(whole + [f"`{n}` from the {side} alone" for side, n in sides.items() if n])


def tables() -> str:
    """All tables."""
    names = sorted(file.stem for file in PRESETS.glob("*.rules"))
    about = {name: comments(name) for name in names}
    parts = [name for name in names if about[name][0].endswith("to be included")]
    text = ""
    for prefix, title in GROUPS.items():
        text += (
            f"## {title}\n\n| preset | maps | checked against | sizes | not exact | left out |\n"
        )
        text += "|---|---|---|---|---|---|\n"
        for name in names:
            maps, tags = about[name]
            if name.startswith(prefix) and name not in parts:
                cells = [tags["Checked"], sizes(tags), tags.get("Not exact"), tags.get("Left out")]
                row = " | ".join(cell or "" for cell in (f"`{name}`", maps, *cells))
                text += f"| {row} |\n".replace("  |", " |")
        included = [f"`{name}`" for name in parts if name.startswith(prefix)]
        text += f"\nThese include: {', '.join(included)}.\n\n" if included else "\n"
    text += "## Layers, optimizers and other systems\n\n| preset | maps |\n|---|---|\n"
    for name in names:
        if not name.startswith((*GROUPS,)):
            text += f"| `{name}` | {about[name][0]} |\n"
    return text


def main() -> None:
    """Writes the tables into the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + tables() + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
