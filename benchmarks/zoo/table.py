"""Writes docs/zoo.md from all results: python -m benchmarks.zoo.table"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
FOUND = Path(__file__).parent / "found"
FLAX_HUB = Path(__file__).parent / "flax_hub.json"
PAGE = Path(__file__).parents[2] / "docs" / "zoo.md"

SOURCES = {
    "transformers_flax": "transformers 4.57.6, Flax and PyTorch classes",
    "transformers_mapping": "transformers 5.24.0, its conversion mapping",
    "mlx_lm": "mlx-lm 0.32.0, `sanitize`",
    "keras_hub": "KerasHub 0.32.0, converters and exporters",
    "timm": "timm 1.0.28, NumPy files and filters",
    "diffusers": "diffusers 0.42.0, single files, image prompts, LoRAs",
    "maxtext": "MaxText 0.2.5, `param_mapping`",
    "torchtitan": "torchtitan 0.3.0, adapters",
    "torchtune": "torchtune 0.6.1",
    "litgpt": "LitGPT 0.5.13",
    "tunix": "google-tunix 0.1.7",
    "vllm": "vLLM 0.32 on a CPU, `load_weights`",
    "megatron": "Megatron-Core and its bridge",
}
"""What the sources are, in the order of the page."""

HEAD = """# The zoo

`Rules.observe` ran the converters of other projects on tiny models and derived their rules. Each
result is checked with fresh numbers in both directions, and against the project's own reverse
converter where one exists.

`python -m benchmarks.zoo SOURCE` runs one source in its environment of `tests/environments.toml`.
`python -m benchmarks.zoo.table` writes this page.

| column | content |
|---|---|
| rules | conversions that became rules completely |
| partly | conversions of which some arrays cannot be rules |
| refused | conversions that no rules express |
| failed | conversions whose own code failed |
| wrong | elements that the rules made differently from the converter or its inverse |
| lines | rules of the source's longest conversion |
"""


def main() -> None:
    """Writes the page."""
    results = {
        file.stem: json.loads(file.read_text())
        for file in sorted(RESULTS.glob("*.json"), key=lambda file: _order(file.stem))
    }
    PAGE.write_text(page(results))
    print(f"{PAGE}: {sum(map(len, results.values()))} conversions of {len(results)} sources")


def page(results: dict[str, list[dict[str, Any]]]) -> str:
    """The page.

    Arguments:
        results: the rows of each source.
    """
    lines = [HEAD, *_totals(results), "", "## Not all rules", "", *_others(results)]
    if notes := sorted(FOUND.glob("[!_]*.py")):
        lines += ["", "## Bugs found in converters", "", *_found(notes)]
    if FLAX_HUB.exists():
        lines += ["", "## Flax checkpoints in transformers 5", "", *_flax_hub()]
    for source, rows in results.items():
        lines += ["", f"## {SOURCES.get(source, source)}", "", *_conversions(rows)]
    return "\n".join(lines) + "\n"


def _order(source: str) -> tuple[int, str]:
    names = list(SOURCES)
    return (names.index(source) if source in names else len(names)), source


def _totals(results: dict[str, list[dict[str, Any]]]) -> list[str]:
    kinds = ("rules", "partly", "refused", "failed")
    lines = [
        "| source | conversions | rules | partly | refused | failed | wrong | arrays | lines |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    sums = [0] * 7
    for source, rows in results.items():
        counts = [len(rows), *(sum(row["result"] == kind for row in rows) for kind in kinds)]
        counts += [_wrong(rows), sum(row.get("arrays", 0) for row in rows)]
        longest = max((row.get("lines", 0) for row in rows), default=0)
        sums = [a + b for a, b in zip(sums, counts, strict=True)]
        cells = [SOURCES.get(source, source), *(f"{n:,}" for n in counts), longest]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines.append(f"| all | {' | '.join(f'{n:,}' for n in sums)} | |")
    return lines


def _wrong(rows: list[dict[str, Any]]) -> int:
    """Those that are -1 were not compared, as only a part is rules."""
    return sum(max(0, row.get("wrong", 0)) for row in rows)


def _others(results: dict[str, list[dict[str, Any]]]) -> list[str]:
    lines = ["| conversion | result | why |", "|---|---|---|"]
    for source, rows in results.items():
        for row in rows:
            if row["result"] != "rules":
                why = " ".join(str(row.get("why", "")).split()).replace("|", "\\|")
                why = why.replace("`", "'")  # as code: brackets would be links
                lines.append(f"| {source}: {row['name']} | {row['result']} | `{why}` |")
    return lines if len(lines) > 2 else ["Nothing."]


def _found(files: list[Path]) -> list[str]:
    """The first paragraph of each reproducer."""
    lines = []
    for file in files:
        first = file.read_text().split('"""')[1].strip().split("\n\n")[0]
        lines.append(f"- `benchmarks/zoo/found/{file.name}`: {' '.join(first.split())}")
    return lines


def _flax_hub() -> list[str]:
    """What `benchmarks.zoo.flax_hub` found."""
    rows = json.loads(FLAX_HUB.read_text())
    equal = sum(row["result"] == "equal" for row in rows)
    good = [row["name"] for row in rows if row["result"] == "equal"]
    families = {name.split("/")[0].split("-")[0] for name in good}
    lines = [
        "The observed rules converted a `flax_model.msgpack` of each class, and transformers 5 "
        f"loaded it. {equal} of {len(rows)} classes, of {len(families)} families, are identical "
        "to the result of transformers 4.57's own converter. The others:",
        "",
    ]
    others = [row for row in rows if row["result"] != "equal"]
    return lines + [
        f"- {row['name']}: {' '.join(str(row.get('why', '')).split())}" for row in others
    ]


def _conversions(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["| conversion | result | arrays | lines | lost | wrong |", "|---|---|---|---|---|---|"]
    for row in rows:
        numbers = (row.get(key, "") for key in ("arrays", "lines", "dropped", "wrong"))
        lines.append(f"| {row['name']} | {row['result']} | {' | '.join(map(str, numbers))} |")
    return lines


if __name__ == "__main__":
    main()
