"""Jobs of `support.data_ranks` one after the other, with other numbers of ranks; what they drew."""

from __future__ import annotations

import json
import math
import os
import signal
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from support.data_ranks import SAMPLES, Config
from support.forked import Forked
from support.processes import Processes

TESTS = Path(__file__).parent.parent
MAIN = """
if __name__ == "__main__":  # not in worker processes that are started anew
    from support.data_ranks import main

    main()
"""


def job(
    processes: Processes, folder: Path, kind: str, run: int, ranks: int, steps: int, **more: Any
) -> int | None:
    """All ranks of a job, until each has ended; the step from which it went on, if none died."""
    defaults = {"replicas": 1, "shards": 24, "workers": 0, "saves": True, "dies": False}
    more = {**defaults, **more}
    path = os.pathsep.join(filter(None, [str(TESTS), str(TESTS.parent)]))
    env = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_DATASETS_OFFLINE": "1"}
    script = folder / "rank.py"
    script.write_text(MAIN)
    started: list[Any] = []
    for rank in range(ranks):
        for replica in range(more["replicas"]):
            config = Config(
                kind=kind,
                folder=str(folder),
                run=run,
                rank=rank,
                ranks=ranks,
                replica=replica,
                steps=steps,
                **more,
            )
            given = [json.dumps(asdict(config))], {**os.environ, **env}
            started.append(Forked(script, *given, ("grain" if "grain" in kind else "torch",)))
            processes.started.append(started[-1])
    if more["dies"]:
        for process in started:
            _, errors = process.communicate(timeout=120)
            assert process.returncode == -signal.SIGKILL, errors
        return None
    begun = {int(printed) for printed in processes.finish(started)}
    assert len(begun) == 1
    return begun.pop()


def drawn(folder: Path, run: int, until: int | None) -> list[int]:
    """What all ranks of a job drew, up to a step."""
    found: list[int] = []
    for file in sorted(folder.glob(f"seen-{run}-*")):
        for line in file.read_text().splitlines():
            step, samples = json.loads(line)
            found += samples if until is None or step <= until else []
    return found


def check(folder: Path, begun: list[int | None], last: int, times: int = 1) -> None:
    """Checks that the jobs together drew every sample, none more often than another.

    Arguments:
        begun: for each job the step from which it went on.
        last: the number of the last job.
        times: how often each sample is drawn: once for each token.
    """
    found: list[int] = []
    for run in range(last + 1):
        until = begun[run + 1] if run < last else None
        found += drawn(folder, run, until)
    counts = Counter(found)
    assert counts == dict.fromkeys(range(SAMPLES), times), {
        "missing": [i for i in range(SAMPLES) if counts[i] < times][:20],
        "too often": [i for i in counts if counts[i] > times][:20],
    }


def there_and_back(
    processes: Processes,
    folder: Path,
    kind: str,
    until: int,
    times: int = 1,
    workers: int = 0,
    ranks: tuple[int, int] = (8, 6),
) -> None:
    """Three jobs, the second killed while it saves; the last, with `until` steps, has as many ranks
    as the first."""
    many, few = ranks
    more = {"workers": workers, "shards": math.lcm(many, few)}
    begun: list[int | None] = [job(processes, folder, kind, 0, many, 3, **more)]
    job(processes, folder, kind, 1, few, 4, dies=True, **more)
    begun += [3, job(processes, folder, kind, 2, many, until, saves=False, **more)]
    assert begun[2] in (6, 7)  # the last save of the job that was killed may have been committed
    check(folder, begun, 2, times)
