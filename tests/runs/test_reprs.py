"""What objects of the public interface are shown as: their names, and what differs from default."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unickpt
from unickpt import Checkpointer, LoadOptions, Retention, Rules, SaveEvery, SaveOptions


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    with Checkpointer("run", options=SaveOptions(fsync=False)) as found:
        yield found


@pytest.mark.plugins
def test_nothing_is_shown_by_its_address(run: Checkpointer) -> None:
    pending = run.save(1, {"w": np.ones(3)}, wait=True)
    step = unickpt.open("run/step_1")
    options = [
        SaveOptions(),
        LoadOptions(),
        Retention(),
        SaveEvery(),
        unickpt.Experts({"e/{x}": 1}),
    ]
    reports = [
        pending.result(),
        unickpt.load(step, return_report=True)[1],
        unickpt.verify(step),
        unickpt.diff(step, step),
        unickpt.copy("run/step_1", "copied"),
    ]
    rules = Rules.parse("a <-> b")
    for one in (run, pending, step, step["w"], step.under("w"), rules, *options, *reports):
        name = type(one).__name__
        assert repr(one).startswith(f"{name}("), repr(one)
        assert " at 0x" not in repr(one)
    assert repr(step).endswith("run/step_1', 1 array)")
    assert repr(rules) == "Rules('rules': 1 rule)"


@pytest.mark.plugins
def test_options_show_what_differs_from_their_defaults() -> None:
    assert repr(SaveOptions()) == "SaveOptions()"
    assert repr(SaveOptions(fsync=False, compression="zstd")) == (
        "SaveOptions(fsync=False, compression='zstd')"
    )
    assert repr(Retention(keep_last=2)) == "Retention(keep_last=2)"
    assert repr(unickpt.Experts({"e/{x}": 1})) == "Experts(each_save={'e/{x}': 1})"

    class Odd:
        def __eq__(self, other: object) -> bool:
            raise ZeroDivisionError

        def __call__(self, report: unickpt.types.SaveReport) -> None: ...

    assert repr(SaveOptions(metrics=Odd())) == "SaveOptions(metrics=<Odd>)"


def test_a_checkpointer_shows_its_steps(run: Checkpointer) -> None:
    assert repr(run).endswith("/run', steps=[])")
    for step in range(9):
        run.save(step, {"w": np.ones(3)})
    run.wait()
    assert repr(run).endswith("/run', steps=[0, ..., 5, 6, 7, 8])")
    run.close()
    assert repr(run).endswith("8], closed)")
    Path("run/step_3").rename("elsewhere")
    Path("run").rename("gone")
    Path("run").write_text("no folder")
    assert repr(run).startswith("Checkpointer('")


def test_a_pending_save_shows_its_report(run: Checkpointer) -> None:
    saved = run.save(1, {"w": np.ones(3)}, wait=True)
    assert "1 array, 24 B in " in repr(saved)


def test_nothing_is_asked_of_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    began = time.monotonic()
    assert repr(Checkpointer("s3://bucket/run")) == "Checkpointer('s3://bucket/run')"
    assert time.monotonic() - began < 5
