"""progress=: a function or a bar sees the bytes of saves and loads, and can harm neither."""

from __future__ import annotations

import io
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.saving import in_job

import unickpt
from unickpt import CheckpointExists, LoadOptions, MissingPackage, SaveOptions
from unickpt.format.ocdbt_reader import OcdbtReader
from unickpt.progress import reporting
from unickpt.saving import writer
from unickpt.testing.thread_groups import Threads

SMALL = {"fsync": False, "chunk_bytes": 4000, "budget_bytes": 64_000}
STATE = {f"w{n}": np.arange(20_000.0) for n in range(3)}
TOTAL = 3 * 160_000

Seen = list[tuple[int, int]]


def check(seen: Seen, total: int = TOTAL, least: int = 5) -> None:
    """The bytes grow from none to all, in several steps."""
    done = [n for n, _ in seen]
    assert done == sorted(done)
    assert (done[0], done[-1]) == (0, total)
    assert {of for _, of in seen} == {total}
    assert len(set(done)) >= least


def telling(seen: Seen) -> Callable[[int, int], None]:
    return lambda done, total: seen.append((done, total))


def test_a_save_tells_a_function_of_its_bytes(tmp_path: Path) -> None:
    seen: Seen = []
    unickpt.save(tmp_path / "a", STATE, options=SaveOptions(**SMALL, progress=telling(seen)))
    check(seen)


def test_a_save_in_the_background_tells_too(tmp_path: Path) -> None:
    seen: Seen = []
    options = SaveOptions(**SMALL, progress=telling(seen))
    unickpt.save_async(tmp_path / "a", STATE, options=options).result()
    check(seen)


@pytest.mark.plugins
def test_what_an_earlier_checkpoint_has_counts(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "a", STATE, options=SaveOptions(**SMALL))
    seen: Seen = []
    options = SaveOptions(**SMALL, base=tmp_path / "a", progress=telling(seen))
    assert unickpt.save(tmp_path / "b", STATE, options=options).reused_bytes == TOTAL
    check(seen)


def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, a disk that takes 10 ms for each large piece."""
    real = os.write

    def write(handle: int, data: Any) -> int:
        time.sleep(0.01 if len(data) > 100_000 else 0)
        return real(handle, data)

    monkeypatch.setattr(os, "write", write)


def test_progress_moves_within_one_chunk_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: Seen = []
    slow_disk(monkeypatch)
    monkeypatch.setattr(writer, "_TELL_EVERY_S", 0.02)
    monkeypatch.setattr(writer, "_LARGE_CHUNK_BYTES", 8 << 20)
    array = np.random.default_rng(0).integers(0, 256, 20 << 20, np.uint8)
    options = SaveOptions(chunk_bytes=20 << 20, progress=telling(seen))
    unickpt.save(tmp_path / "a", {"w": array}, options=options)
    check(seen, array.nbytes, least=8)


def test_a_load_tells_of_one_array_in_the_order_in_which_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = SaveOptions(fsync=False, chunk_bytes=1 << 20)
    unickpt.save(tmp_path / "a", {"w": np.zeros(64 << 20, np.uint8)}, options=options)
    real, read, ahead = OcdbtReader.read, [0], list[int]()

    def slow(self: Any, requests: Any) -> Any:
        time.sleep(0.01)
        read[0] += sum(request.out.nbytes for request in requests)
        return real(self, requests)

    monkeypatch.setattr(OcdbtReader, "read", slow)
    progress: Any = lambda done, total: ahead.append(read[0] - done)  # noqa: E731
    unickpt.load(tmp_path / "a", options=LoadOptions(progress=progress))
    assert len(ahead) > 8
    assert max(ahead) < 48 << 20  # what a few threads have read, not nearly all


@pytest.mark.plugins
def test_experts_that_a_save_leaves_out_count(tmp_path: Path) -> None:
    seen: Seen = []
    state = {"experts": {str(n): {"w": np.arange(1000.0) + n} for n in range(4)}}
    options = SaveOptions(fsync=False, progress=telling(seen))
    arguments: Any = {"experts": unickpt.Experts({"**/experts/{x}/**": 1}), "options": options}
    with unickpt.Checkpointer(tmp_path / "run", **arguments) as run:
        run.save(1, state, wait=True)
        check(seen, 32_000, least=2)
        seen.clear()
        run.save(2, state, wait=True)
    check(seen, 32_000, least=2)


def test_each_process_counts_its_own_bytes(tmp_path: Path) -> None:
    seen: dict[int, Seen] = {0: [], 1: []}

    def save(group: Any) -> int:
        options = SaveOptions(**SMALL, group=group, progress=telling(seen[group.index]))
        return unickpt.save(tmp_path / "a", STATE, options=options).written_bytes

    written = in_job(2, save)
    assert sum(written) == TOTAL
    for process, of in seen.items():
        check(of, written[process], least=3)


def test_a_load_tells_a_function_of_its_bytes(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "a", STATE, options=SaveOptions(**SMALL))
    for like in (None, {name: np.zeros_like(array) for name, array in STATE.items()}):
        seen: Seen = []
        options = LoadOptions(budget_bytes=64_000, progress=telling(seen))
        found = unickpt.load(tmp_path / "a", like, options=options)
        check(seen, least=3)
        np.testing.assert_array_equal(found["w2"], STATE["w2"])


@pytest.mark.plugins
def test_processes_that_load_together_tell_too(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "a", STATE, options=SaveOptions(**SMALL))
    seen: dict[int, Seen] = {0: [], 1: []}

    def load(process: int, options: LoadOptions) -> Any:
        told = replace(options, progress=telling(seen[process]))
        return unickpt.load(tmp_path / "a", options=told)["w2"]

    for found in Threads(2).run(load, budget_bytes=64_000):
        np.testing.assert_array_equal(found, STATE["w2"])
    for of in seen.values():
        check(of, least=10)  # also within each of the three arrays


@pytest.mark.plugins
def test_the_tools_take_the_same(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "a", STATE, options=SaveOptions(**SMALL))
    to = SaveOptions(**SMALL)
    calls: list[Callable[[Any], object]] = [
        lambda told: unickpt.convert(tmp_path / "a", tmp_path / "b", options=to, progress=told),
        lambda told: unickpt.merge(
            [tmp_path / "a", tmp_path / "b"], tmp_path / "c", options=to, progress=told
        ),
        lambda told: unickpt.verify(tmp_path / "a", progress=told),
        lambda told: unickpt.diff(tmp_path / "a", tmp_path / "b", progress=told),
        lambda told: unickpt.copy(tmp_path / "a", tmp_path / "d", progress=told),
        lambda told: unickpt.convert(
            tmp_path / "a", tmp_path / "e.npz", to="npz", options=to, progress=told
        ),
    ]
    for call in calls:
        seen: Seen = []
        call(telling(seen))
        assert seen[-1][0] > 0
        assert seen[-1][0] <= seen[-1][1]


def test_an_error_of_the_function_harms_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def broken(done: int, total: int) -> None:
        calls.append(done)
        raise BrokenPipeError("the terminal is gone")

    unickpt.save(tmp_path / "a", STATE, options=SaveOptions(**SMALL, progress=broken))
    found = unickpt.load(tmp_path / "a", options=LoadOptions(progress=broken))
    np.testing.assert_array_equal(found["w1"], STATE["w1"])
    assert len(calls) == 2  # it is not called again
    assert caplog.text.count("progress cannot be shown any more") == 2


@pytest.mark.parametrize("make", [SaveOptions, LoadOptions])
def test_what_is_no_progress_is_refused_before_anything_is_done(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TypeError, match="progress is True or a function"):
        make(progress="yes")
    monkeypatch.setattr("unickpt.progress.find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match=r"pip install 'unickpt\[progress\]'"):
        make(progress=True)
    make(progress=False)


# --- bars -----------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """What is written on a terminal from here on; no fixture, because pytest would undo it."""
    if util.find_spec("tqdm") is None:
        pytest.skip("without tqdm")
    found = Terminal()
    monkeypatch.setattr(sys, "stderr", found)
    return found


def test_a_terminal_shows_a_bar_that_ends_at_all_bytes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    terminal = on_terminal(monkeypatch)
    before = set(threading.enumerate())  # of other tests, too
    unickpt.save(tmp_path / "a", STATE, options=SaveOptions(**SMALL, progress=True))
    assert "saving: 100%" in terminal.getvalue()
    assert "480k/480k" in terminal.getvalue()
    unickpt.load(tmp_path / "a", options=LoadOptions(progress=True))
    assert "loading: 100%" in terminal.getvalue()
    left = {thread.name for thread in threading.enumerate() if thread not in before}
    assert len(left) <= 1  # of the pools, but no monitor of tqdm
    assert "tqdm_monitor" not in left


def test_a_bar_is_removed_if_the_work_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)

    def fail() -> None:
        with reporting(True, "working") as told:
            told(1, 2)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert "working:   0%" in terminal.getvalue()
    assert terminal.getvalue().rstrip("\r").endswith(" ")  # overwritten with blanks
    assert not terminal.getvalue().endswith("\n")


def test_a_save_that_is_refused_shows_no_bar(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    terminal = on_terminal(monkeypatch)
    options = SaveOptions(**SMALL, progress=True)
    unickpt.save(tmp_path / "a", STATE, options=SaveOptions(**SMALL))
    with pytest.raises(CheckpointExists):
        unickpt.save(tmp_path / "a", STATE, options=options)
    assert terminal.getvalue() == ""


def test_only_process_0_shows_a_bar(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    terminal = on_terminal(monkeypatch)

    def save(group: Any) -> None:
        options = SaveOptions(**SMALL, group=group, progress=True)
        unickpt.save(tmp_path / "a", STATE, options=options)

    in_job(3, save)
    assert "saving: 100%" in terminal.getvalue()
    assert terminal.getvalue().count("\n") == 1, "a bar ends its line when it is done"


def test_without_a_terminal_nothing_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = io.StringIO()
    monkeypatch.setattr(sys, "stderr", found)
    monkeypatch.setattr("unickpt.progress.find_spec", lambda name: object())
    unickpt.save(tmp_path / "a", STATE, options=SaveOptions(**SMALL, progress=True))
    monkeypatch.setattr(sys, "stderr", None)  # as under pythonw
    unickpt.load(tmp_path / "a", options=LoadOptions(progress=True))
    assert found.getvalue() == ""
