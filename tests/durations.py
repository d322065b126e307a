"""How long tests take: recorded by each run of whole files, compared with tests/durations.json.

    python tests/durations.py            # what became slower since the file was stored
    python tests/durations.py --store    # stores what the last runs took

What is stored and compared is what a test and its processes computed, in CPU seconds of files and
of tests that take long: these hardly grow with the machine's load. It says nothing about waiting.

The hooks are part of tests/conftest.py, which also fails a test that is not marked, so that it is
one of `make test-fast`, and takes far longer than LIMIT_S.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.forked import computed

ROOT = Path(__file__).resolve().parent.parent
STORED = ROOT / "tests" / "durations.json"
RECORD = "unickpt/durations"  # in pytest's cache
MARKS = ("integration", "slow", "trainers", "environment", "gpu")  # of tests that may take long
LIMIT_S = 1.5
# In a run, it fails from here on: on a slow machine whose cores are shared, the same test takes
# this much longer, in CPU seconds too. `make durations` lists all.
LIMIT_OF_A_RUN_S = 5 * LIMIT_S
IMPORTS = 100  # a test that is the first to import so many modules is not judged
LONG_S = 1.0  # tests that are stored by name
SLOWER, SLOWER_S = 1.3, 1.0  # what counts as slower: so many times, and by so many seconds


@dataclass(frozen=True)
class Took:
    """What a test took: its time less what it waited for a core, and what was computed."""

    seconds: float
    cpu: float
    marked: bool


# --- what a test takes ----------------------------------------------------------------------------


def _waited() -> float:
    """For how many seconds the main thread of this process was ready, and had no core."""
    try:
        with open("/proc/self/schedstat") as stat:
            return int(stat.read().split()[1]) / 1e9
    except (OSError, IndexError):  # not Linux
        return 0.0


def too_long(took: Took) -> str | None:
    """What to say of a test that is not marked."""
    busy = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    if took.cpu <= LIMIT_OF_A_RUN_S and took.seconds <= LIMIT_OF_A_RUN_S * busy:
        return None
    return (
        f"it took {took.seconds:.1f} s ({took.cpu:.1f} s of a core). A test that is not marked may "
        f"take {LIMIT_S} s: check less at a time, or mark it `integration` "
        "(CONTRIBUTING.md, Edit and test)"
    )


class Recorder:
    """A plugin of pytest."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._before = (0.0, 0.0, 0.0)
        self._modules = 0
        self._tests: dict[str, list[Any]] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self) -> None:
        self._before = sum(os.times()[:4]), computed(), _waited()
        self._modules = len(sys.modules)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, Any, Any]:
        report = yield
        now = sum(os.times()[:4]), computed(), _waited()
        own, others, waited = (
            after - before for after, before in zip(now, self._before, strict=True)
        )
        self._before = now
        marked = any(item.get_closest_marker(mark) for mark in MARKS)
        seconds = max(0.0, call.duration - waited)
        report.took = [seconds, own + max(0.0, others), marked]
        imports = len(sys.modules) - self._modules >= IMPORTS
        judged = not marked and not imports and call.when == "call"
        text = too_long(Took(seconds, own, marked)) if judged else None
        if text and report.passed:
            report.outcome, report.longrepr = "failed", text
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        """In the process that hears of all tests."""
        if (took := getattr(report, "took", None)) is not None:
            seconds, cpu, _ = self._tests.get(report.nodeid, (0.0, 0.0, False))
            self._tests[report.nodeid] = [seconds + took[0], cpu + took[1], took[2]]

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        option, cache = self._config.option, getattr(self._config, "cache", None)
        partly = (
            option.keyword or getattr(option, "lf", False) or "not integration" in option.markexpr
        )
        partly = partly or any("::" in each for each in self._config.args)
        if hasattr(self._config, "workerinput") or cache is None or partly or exitstatus > 1:
            return
        files = {name.partition("::")[0] for name in self._tests}
        known = cache.get(RECORD, {})
        known = {name: took for name, took in known.items() if name.partition("::")[0] not in files}
        rounded = {
            name: [round(took[0], 2), round(took[1], 2), took[2]]
            for name, took in self._tests.items()
        }
        cache.set(RECORD, {**known, **rounded})


# --- what they took before ------------------------------------------------------------------------


def summary(tests: Mapping[str, Took]) -> dict[str, dict[str, float]]:
    """What is stored: the CPU seconds of files, and of tests that take long."""
    files: dict[str, float] = {}
    for name, took in sorted(tests.items()):
        file = name.partition("::")[0]
        files[file] = files.get(file, 0.0) + took.cpu
    long = {name: took.cpu for name, took in sorted(tests.items()) if took.cpu >= LONG_S}
    found = {"files": files, "tests": long}
    return {kind: {name: round(of[name], 1) for name in of} for kind, of in found.items()}


def slower(
    before: Mapping[str, Mapping[str, float]], now: Mapping[str, Mapping[str, float]]
) -> Iterator[str]:
    """A line for each file and test that computes more than before."""
    for kind in ("files", "tests"):
        for name, cpu in now[kind].items():
            old = before[kind].get(name)
            if old is None and kind == "tests" and name.partition("::")[0] not in before["files"]:
                continue  # told with its file, which is new
            was = old or 0.0
            if cpu > SLOWER * was and cpu > was + SLOWER_S:
                said = "new" if kind == "files" else f"before below {LONG_S} s"
                said = said if old is None else f"before {old:.1f} s"
                yield f"{name}: {cpu:.1f} s of a core, {said}"


def unmarked(tests: Mapping[str, Took]) -> Iterator[str]:
    """A line for each test that should be marked, or shorter."""
    for name, took in sorted(tests.items()):
        if not took.marked and min(took.seconds, took.cpu) > LIMIT_S:
            yield f"{name}: {took.seconds} s ({took.cpu} s of a core), and it has no mark"


def recorded(root: Path = ROOT) -> dict[str, Took]:
    """What the last runs took, of tests whose files are still there."""
    file = root / ".pytest_cache" / "v" / RECORD
    if not file.is_file():
        sys.exit("no run was recorded yet: run `make test`, or pytest with some files, first")
    tests = {name: Took(*took) for name, took in json.loads(file.read_text()).items()}
    return {n: took for n, took in tests.items() if (root / n.partition("::")[0]).is_file()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", action="store_true", help="store what the last runs took")
    arguments = parser.parse_args()
    tests = recorded()
    now = summary(tests)
    before = json.loads(STORED.read_text()) if STORED.is_file() else {"files": {}, "tests": {}}
    lines = [*slower(before, now), *unmarked(tests)]
    print("\n".join(lines) or "nothing became slower")
    total = sum(took.cpu for took in tests.values())
    print(f"{len(tests)} tests in {len(now['files'])} files: {total:.0f} s of a core")
    if arguments.store:
        ran = now["files"]
        for kind in ("files", "tests"):
            others = {
                name: cpu
                for name, cpu in before[kind].items()
                if (file := name.partition("::")[0]) not in ran and (ROOT / file).is_file()
            }
            now[kind] = dict(sorted({**others, **now[kind]}.items()))
        STORED.write_text(json.dumps(now, indent=1, ensure_ascii=False) + "\n")
        return 0
    return int(bool(lines))


if __name__ == "__main__":
    raise SystemExit(main())
