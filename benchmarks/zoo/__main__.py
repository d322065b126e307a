"""Observes other people's converters, and checks the rules on fresh numbers in both directions.

python -m benchmarks.zoo SOURCE [--only TEXT] [--json FILE] [--rules FOLDER]

A source is a module of this package with a function `conversions()`, which yields `Conversion`s.
Each runs in an environment that has the source's package: see tests/environments.toml.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.zoo.conversion import Conversion
from unickpt import Rules
from unickpt.errors import RuleError
from unickpt.plugins.observe.agreement import through
from unickpt.plugins.observe.converters import Converter, Example


def main() -> None:
    """Runs a source."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source")
    parser.add_argument("--only", default="")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rules", type=Path, help="folder for what was observed")
    arguments = parser.parse_args()
    rows = []
    for row in rows_of(arguments.source, arguments.only, arguments.rules):
        rows.append(row)
        print(" ".join(f"{key}={value}" for key, value in row.items()), flush=True)
        if arguments.json:  # after each, as a run of a source may be cut off
            arguments.json.write_text(json.dumps(rows, indent=1))
    good = sum(row["result"] == "rules" for row in rows)
    print(f"{arguments.source}: {good} of {len(rows)} are rules", file=sys.stderr)


def rows_of(source: str, only: str = "", folder: Path | None = None) -> Iterator[dict[str, Any]]:
    """The rows of a source: a module with `conversions`, or with `rows` of its own."""
    module = importlib.import_module(f"benchmarks.zoo.{source}")
    if hasattr(module, "rows"):
        yield from module.rows(only, folder)
        return
    for conversion in module.conversions():
        if only in conversion.name:
            yield observed(conversion, folder)


def observed(conversion: Conversion, folder: Path | None) -> dict[str, Any]:
    """One conversion as a row of the table."""
    row: dict[str, Any] = {"name": conversion.name, "result": "rules"}
    begin = time.monotonic()
    try:
        rules = Rules.observe(conversion.function, conversion.example, strict=False)
    except RuleError as error:
        return {**row, "result": "refused", "why": str(error)[:300]}
    except Exception as error:
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        return {**row, "result": "failed", "why": why[:300]}
    report = rules.report
    assert report is not None
    row |= {
        "arrays": report.covered,
        "lines": report.lines,
        "dropped": len(report.dropped),
        "not made": len(report.not_made),
        "seconds": round(time.monotonic() - begin, 2),
    }
    if report.refused:
        name, why = next(iter(report.refused.items()))
        row |= {"result": "partly", "refused": len(report.refused), "why": f"{name!r} {why}"[:300]}
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{conversion.name.replace('/', '_')}.rules").write_text(report.text)
    return row | compared(conversion, rules)


def compared(conversion: Conversion, rules: Rules) -> dict[str, Any]:
    """How many elements rules make otherwise than the converter, and its inverse if it has one;
    and why that fails if it does."""
    assert rules.report is not None
    report = rules.report
    example = Example.of(conversion.example, None)
    random = np.random.default_rng(7)
    given = {
        name: random.integers(-100, 100, shape).astype(dtype)
        for name, (shape, dtype) in example.arrays.items()
    }
    returned_tree: list[Any] = []

    def recorded(tree: Any) -> Any:
        found = conversion.function(tree)
        returned_tree[:] = [tree if found is None else found]
        return found

    made = Converter(recorded, example)(given)
    without = (*report.not_made, *report.refused)
    wrong = _compare(rules, given, made, without, (*report.scaled,))
    if report.refused:  # nothing can be said of the other direction without these
        return {"wrong": wrong}
    whole = _without_lost(rules, given, made)
    back = _compare(
        rules.inverse, made, whole, report.dropped, tuple(given) if report.scaled else ()
    )
    if conversion.inverse is not None:
        # In the containers and of the framework that the inverse takes.
        there = Example.of(returned_tree[0], None)
        try:
            returned = Converter(conversion.inverse, there)(made)
        except Exception as error:
            why = f"{type(error).__name__}: {error}".partition("\n")[0]
            return {"wrong": wrong + back, "inverse": why[:300]}
        asked = {name: x for name, x in returned.items() if name in given}
        other = [name for name, x in asked.items() if x.shape != given[name].shape]
        if other:
            shapes = f"{asked[other[0]].shape}, not {given[other[0]].shape}"
            return {"wrong": wrong + back, "inverse": f"{other[0]!r} has shape {shapes}"}
        asked = {
            name: np.where(whole[name] != given[name], whole[name], x) for name, x in asked.items()
        }
        back += _compare(rules.inverse, made, asked, report.dropped, tuple(given))
    return {"wrong": wrong + back}


def _without_lost(rules: Rules, given: dict[str, Any], made: dict[str, Any]) -> dict[str, Any]:
    """What was given, with 0 for elements that the converter cuts off.

    An element is one of these if the other direction makes it 0, and what is made of that is the
    same all over: no element of it depends on the one that is 0.
    """
    back = through(rules.inverse, made, given, strict=False)
    again = through(rules, {**given, **back}, made, strict=False)
    if any(name in again and not np.allclose(again[name], x) for name, x in made.items()):
        return given
    return {
        name: np.where(back[name] == 0, 0, x).astype(x.dtype) if name in back else x
        for name, x in given.items()
    }


def _compare(
    rules: Rules, have: dict[str, Any], want: dict[str, Any], without: Any, scaled: Any
) -> int:
    found = through(rules, have, want, strict=False)
    wrong = 0
    for name, x in want.items():
        if name in without or not x.size:
            continue
        if name not in found:
            wrong += x.size
        elif name in scaled:
            wrong += int((~np.isclose(found[name], x, rtol=1e-5, atol=1e-4)).sum())
        else:
            wrong += int((found[name] != x).sum())
    return wrong


if __name__ == "__main__":
    main()
