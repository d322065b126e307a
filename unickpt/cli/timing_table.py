"""The tables of `inspect --timing`: the time of a save by process and phase."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text

from unickpt.format.timing import PHASES, Timing
from unickpt.quoting import counted, size_text
from unickpt.tools.terminal.tables import print_table

_SHOWN = 16
_PHASE = ("phase", "mean", "median", "busiest", "process", "busiest / mean")


def print_timing(out: Console, timing: Timing, everything: bool) -> None:
    """Prints the time of each phase, and the processes, the slowest first.

    Arguments:
        out: where to.
        timing: of a save.
        everything: whether all processes are shown, however many.
    """
    last = int(timing.slowest[0])
    out.print(
        f"{counted(timing.processes, 'process', 'processes')}: all were done after "
        f"{_s(timing.done.max())}, the median after {_s(np.median(timing.done))}; process 0 had "
        f"merged what they wrote after {_s(timing.merged)}"
    )
    if timing.processes > 1:
        waited = timing.waited
        out.print(
            f"the others waited {_s(waited.sum() / (timing.processes - 1))} on average for "
            f"process {last}, the last"
        )
    out.print()
    print_table(_PHASE, _phase_rows(timing), right=_PHASE[1:], out=out)
    out.print()
    _print_processes(out, timing, everything)


def _phase_rows(timing: Timing) -> Iterator[list[str]]:
    for name, seconds in timing.seconds.items():
        if seconds.any():
            yield [name, *_spread(seconds, _s)]
    for name in ("written", "stored", "reused", "staged"):
        nbytes = getattr(timing, name)
        if nbytes.any() and not (name == "stored" and (nbytes == timing.written).all()):
            yield [name, *_spread(nbytes, lambda n: size_text(int(n)))]


def _spread(values: NDArray[Any], text: Any) -> list[str]:
    mean, most = float(values.astype(float).mean()), values.max()
    over = f"{float(most) / mean:.2f}" if mean else ""
    return [text(mean), text(np.median(values)), text(most), str(int(values.argmax())), over]


def _print_processes(out: Console, timing: Timing, everything: bool) -> None:
    phases = [name for name in PHASES if timing.seconds[name].any()]
    sizes = [name for name in ("written", "reused", "staged") if getattr(timing, name).any()]
    names = ("process", "began", *phases, "done", "waited", *sizes, "GB/s")
    shown = timing.slowest if everything else timing.slowest[:_SHOWN]
    done, waited = timing.done, timing.waited

    def row(process: int) -> list[str]:
        wrote_s = float(timing.seconds["write"][process])
        rate = float(timing.written[process]) / 1e9 / wrote_s if wrote_s else 0.0
        return [
            str(process),
            _s(timing.began[process]),
            *(_s(timing.seconds[name][process]) for name in phases),
            _s(done[process]),
            _s(waited[process]),
            *(size_text(int(getattr(timing, name)[process])) for name in sizes),
            f"{rate:.2f}",
        ]

    print_table(names, map(row, shown), right=names, out=out)
    if len(shown) < timing.processes:
        hidden_count = timing.processes - len(shown)
        out.print(Text(f"{hidden_count:,} more were done earlier; --all shows each", "dim"))


def timing_json(timing: Timing) -> dict[str, Any]:
    """All of it, for programs."""
    return {
        "processes": timing.processes,
        "collected": timing.collected,
        "merged": timing.merged,
        "began": _numbers(timing.began),
        "at": {name: _numbers(column) for name, column in timing.at.items()},
        "seconds": {name: _numbers(column) for name, column in timing.seconds.items()},
        "done": _numbers(timing.done),
        "waited": _numbers(timing.waited),
        "blocked": _numbers(timing.blocked),
        **{name: _numbers(getattr(timing, name)) for name in _SIZES},
    }


_SIZES = ("written", "stored", "reused", "staged", "chunks")


def _numbers(column: NDArray[Any]) -> list[Any]:
    return [round(x, 6) if isinstance(x, float) else x for x in column.tolist()]


def _s(seconds: Any) -> str:
    return f"{float(seconds):.3f} s" if abs(seconds) < 10 else f"{float(seconds):.1f} s"
