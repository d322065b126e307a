"""tests/durations.py: what it records of a run, what it fails, and what it calls slower."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import durations
import pytest
from durations import Took
from support import TESTS

A_RUN = """
import sys, time, pytest
def busy(seconds):
    start = time.process_time()
    while time.process_time() - start < seconds: pass
def test_quick(): pass
def test_long(): busy(0.8)
@pytest.mark.integration
def test_marked(): busy(0.8)
@pytest.mark.integration
def test_waits(): time.sleep(1)
def test_imports():
    sys.modules.update({f"module_{i}": time for i in range(200)})
    busy(0.8)
"""


@pytest.mark.integration
def test_a_run_fails_what_is_long_without_a_mark_and_records_all(tmp_path: Path) -> None:
    conftest = (
        "import durations\n"
        "durations.LIMIT_OF_A_RUN_S = 0.4\n"
        "def pytest_configure(config): config.pluginmanager.register(durations.Recorder(config))\n"
    )
    (tmp_path / "conftest.py").write_text(conftest)
    (tmp_path / "test_run.py").write_text(A_RUN)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = integration\n")
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir", str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": TESTS, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}

    def run(*arguments: str) -> str:
        words = [*command, *arguments]
        return subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True).stdout

    said = run("-p", "xdist", "-n", "2")
    assert "1 failed, 4 passed" in said
    assert "FAILED test_run.py::test_long" in said
    assert "A test that is not marked may take 1.5 s" in said
    found = durations.recorded(tmp_path)
    assert {name.partition("::")[2] for name in found} == {
        "test_quick", "test_long", "test_marked", "test_waits", "test_imports"}  # fmt: skip
    assert not found["test_run.py::test_long"].marked
    assert found["test_run.py::test_marked"].cpu > 0.6
    waits = found["test_run.py::test_waits"]
    assert waits.seconds > 0.7 > waits.cpu
    # A part of a file says nothing about the others.
    run("test_run.py::test_quick")
    assert durations.recorded(tmp_path).keys() == found.keys()


@pytest.mark.parametrize(("took", "fails"), [(Took(2, 2, False), False), (Took(2, 9, False), True)])
def test_a_busy_machine_fails_no_test(took: Took, fails: bool) -> None:
    assert bool(durations.too_long(took)) == fails


def test_a_test_that_only_waits_fails_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (0.5, 0, 0))
    assert "it took 9.0 s" in (durations.too_long(Took(9, 0, False)) or "")
    monkeypatch.setattr(os, "getloadavg", lambda: (99.0 * (os.cpu_count() or 1), 0, 0))
    assert durations.too_long(Took(9, 0, False)) is None


def test_what_became_slower() -> None:
    before = durations.summary({"a::x": Took(9, 2, True), "b::y": Took(1, 0.2, True)})
    assert [*durations.slower(before, before)] == []
    now = durations.summary({"a::x": Took(9, 4, True), "b::y": Took(9, 0.2, True)})
    assert [*durations.slower(before, now)] == [
        "a: 4.0 s of a core, before 2.0 s",
        "a::x: 4.0 s of a core, before 2.0 s",
    ]
    quick = durations.summary({"b::y": Took(9, 3, True), "c::z": Took(3, 3, True)})
    assert [*durations.slower(before, quick)] == [
        "b: 3.0 s of a core, before 0.2 s",
        "c: 3.0 s of a core, new",
        "b::y: 3.0 s of a core, before below 1.0 s",
    ]


def test_what_should_be_marked() -> None:
    tests = {"a::x": Took(1.6, 1.7, False), "a::y": Took(9, 9, True), "a::z": Took(9, 1.2, False)}
    assert [*durations.unmarked(tests)] == ["a::x: 1.6 s (1.7 s of a core), and it has no mark"]


def test_what_is_stored_is_small() -> None:
    assert json.loads(durations.STORED.read_text()).keys() == {"files", "tests"}
    assert durations.STORED.stat().st_size < 200_000
