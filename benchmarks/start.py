"""What a program waits for in the beginning: importing unickpt, the first save, the first load.

    python benchmarks/start.py --rounds 9
    python benchmarks/start.py --arrays 1000 --frameworks numpy

Each measurement is a new process, all kinds in turns; the first round, which compiles the modules,
is not counted. What a library builds upon is imported before the clock starts (torch for DCP, jax
for Orbax; nothing for unickpt, whose time includes NumPy and TensorStore). Then, for each
framework, a process saves and loads arrays of 4 KiB ten times, without fsync, to paths of their
own. CPU is that of the whole process. Medians, of the imports with quartiles.

In the end the process counts what is left of it: Python's threads besides the main one, other
threads (TensorStore's, which wait for work as long as the process runs), child processes, and files
of the checkpoints that are open.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from rich.console import Console
from rich.table import Table

IMPORTS = {
    "numpy and tensorstore": ((), ("numpy", "tensorstore")),
    "unickpt": ((), ("unickpt",)),
    "torch.distributed.checkpoint, after torch": (
        ("torch",),
        ("torch.distributed.checkpoint",),
    ),
    "orbax.checkpoint, after jax": (("jax",), ("orbax.checkpoint",)),
}
FRAMEWORKS = ("numpy", "torch", "jax")
TIMES = 10


def main() -> None:
    """Run what the command line asks for."""
    from peers import add_run_arguments, fresh_directory, machine_facts, print_facts

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--arrays", type=int, default=64)
    parser.add_argument("--frameworks", nargs="+", choices=FRAMEWORKS, default=FRAMEWORKS)
    add_run_arguments(parser)
    arguments = parser.parse_args()
    console = Console(width=120)
    imports: dict[str, list[float]] = {}
    used: dict[str, list[dict[str, Any]]] = {}
    with fresh_directory(arguments.dir) as directory:
        print_facts(console, machine_facts(directory))
        for number in range(arguments.rounds + 1):
            for name in IMPORTS:
                took = measured(directory, "import", name)
                if number:
                    imports.setdefault(name, []).append(took)
            for framework in arguments.frameworks:
                found = measured(directory, "use", framework, str(arguments.arrays))
                if number:
                    used.setdefault(framework, []).append(found)
    console.print(imports_table(imports))
    console.print(uses_table(used, arguments.arrays))
    for framework, found in used.items():
        left = {what: max(each["left"][what] for each in found) for what in found[0]["left"]}
        console.print(f"left in the end, {framework}: {left}")


def measured(directory: Path, *what: str) -> Any:
    """What a new process measures."""
    compiled = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(directory / "compiled")}
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        command = [sys.executable, "-W", "ignore", __file__, "--measure", folder, *what]
        out = subprocess.run(
            command, stdout=subprocess.PIPE, check=True, env={**os.environ, **compiled}
        )
    return json.loads(out.stdout)


def measure_import(folder: Path, name: str) -> float:
    """The seconds that an import takes in this process."""
    before, modules = IMPORTS[name]
    for module in before:
        __import__(module)
    started = perf_counter()
    for module in modules:
        __import__(module)
    return perf_counter() - started


def measure_use(folder: Path, framework: str, count: str) -> dict[str, Any]:
    """The times of saves and loads in this process, and what is left of them."""
    if framework != "numpy":
        __import__(framework)
    import numpy as np

    tree: dict[str, Any] = {f"w{n}": np.full((32, 32), n, np.float32) for n in range(int(count))}
    if framework == "torch":
        import torch

        tree = {name: torch.from_numpy(array) for name, array in tree.items()}
    elif framework == "jax":
        import jax

        tree = jax.block_until_ready({name: jax.device_put(a) for name, a in tree.items()})

    import unickpt

    options = unickpt.SaveOptions(fsync=False)
    saves: list[tuple[float, float]] = []
    loads: list[tuple[float, float]] = []

    def timed(times: list[tuple[float, float]], work: Callable[[], object]) -> None:
        wall, cpu = perf_counter(), process_time()
        work()
        times.append((perf_counter() - wall, process_time() - cpu))

    for number in range(TIMES):
        path = folder / str(number)
        timed(saves, lambda path=path: unickpt.save(path, tree, options=options))  # type: ignore[misc]
    for number in range(TIMES):
        path = folder / str(number)
        timed(loads, lambda path=path: unickpt.load(path, tree))  # type: ignore[misc]
    return {"save": saves, "load": loads, "left": left(folder)}


def left(folder: Path) -> dict[str, int]:
    """What runs or is open in this process."""
    python = threading.enumerate()
    descriptors = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
    files = [os.readlink(each) for each in descriptors if os.path.exists(each)]
    tasks = os.listdir("/proc/self/task")
    return {
        "Python threads": len(python) - 1,
        "other threads": len(tasks) - len(python),
        "child processes": sum(
            len(Path(f"/proc/self/task/{task}/children").read_text().split()) for task in tasks
        ),
        "open files": sum(path.startswith(str(folder)) for path in files),
    }


def imports_table(imports: Mapping[str, Sequence[float]]) -> Table:
    """The table of imports."""
    table = Table(title="Imports, seconds", title_justify="left")
    table.add_column("module")
    table.add_column("median (quartiles)", justify="right")
    for name, times in imports.items():
        table.add_row(name, spread(times, "{:.3f}"))
    return table


def uses_table(used: Mapping[str, Sequence[Mapping[str, Any]]], count: int) -> Table:
    """The table of saves and loads."""
    table = Table(title=f"{count} arrays of 4 KiB, milliseconds", title_justify="left")
    for column in ("framework", "", "first", "second", "tenth", "CPU: first", "tenth"):
        table.add_column(column, justify="left" if len(table.columns) < 2 else "right")
    for framework, found in used.items():
        for what in ("save", "load"):
            row = [
                spread([1e3 * each[what][number][clock] for each in found], "{:.1f}", short=True)
                for number, clock in ((0, 0), (1, 0), (-1, 0), (0, 1), (-1, 1))
            ]
            table.add_row(framework, what, *row)
    return table


def spread(values: Sequence[float], form: str, *, short: bool = False) -> str:
    """The median, and the quartiles where there are any and there is room."""
    if short or len(values) < 2:
        return form.format(statistics.median(values))
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{form.format(middle)} ({form.format(low)} to {form.format(high)})"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        does = {"import": measure_import, "use": measure_use}[sys.argv[3]]
        print(json.dumps(does(Path(sys.argv[2]), *sys.argv[4:])))
    else:
        main()
