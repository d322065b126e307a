"""What a save did is kept with it: by process and phase, whatever the hosts' clocks say."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from support.forging import forge
from support.saving import in_job, numbers, save_in_job

import unickpt
from unickpt import PerProcess, SaveOptions
from unickpt.commit.messages import CHUNK_DTYPE, Record
from unickpt.extend import SaveFeature
from unickpt.format import timing
from unickpt.format.timing import PHASES, TIMING_KEY, Arrivals, Timing
from unickpt.saving import writer


def tree(index: int) -> dict[str, Any]:
    return {"w": np.arange(50_000.0), "mine": PerProcess(index)}


def test_the_processes_statistics_are_those_of_the_reports(tmp_path: Path) -> None:
    reports = save_in_job(tmp_path, 3, tree)
    found = unickpt.open(tmp_path).timing
    assert found is not None
    assert found.processes == 3
    assert found.written.tolist() == [report.written_bytes for report in reports]
    assert found.chunks.tolist() == [report.chunks for report in reports]
    assert found.began[0] == 0
    for process, report in enumerate(reports):
        for phase in ("describe", "plan"):
            assert found.seconds[phase][process] == pytest.approx(report.phases[phase], abs=1e-6)
        assert 0 < found.seconds["write"][process] <= report.phases["write"]
        assert found.done[process] <= found.collected + 1e-3
    assert found.waited.min() == 0
    assert found.collected <= found.merged <= reports[0].seconds
    assert found.slowest[0] == found.done.argmax()


def test_the_phases_of_a_background_save_are_kept(tmp_path: Path) -> None:
    state = numbers(1)
    first = unickpt.save_async(
        tmp_path / "a", state, options=SaveOptions(staging="copy", timing=True)
    )
    second = unickpt.save_async(
        tmp_path / "b", state, options=SaveOptions(staging="copy", timing=True)
    )
    first.result()
    report = second.result()
    found = unickpt.open(tmp_path / "b").timing
    assert found is not None
    assert found.staged.tolist() == [report.staged_bytes]
    assert found.seconds["stage"][0] == pytest.approx(report.phases["stage"], abs=1e-6)
    assert found.seconds["queue"][0] == pytest.approx(report.phases["queue"], abs=1e-6)
    assert found.at["stage"][0] == pytest.approx(report.phases["describe"], abs=1e-3)
    assert found.blocked[0] == pytest.approx(report.blocked_s, abs=1e-6)


def test_a_call_that_waits_for_the_commit_blocks_its_caller_until_then(tmp_path: Path) -> None:
    with unickpt.Checkpointer(tmp_path, options=SaveOptions(timing=True)) as checkpointer:
        waited = checkpointer.save(1, numbers(1), wait=True).result()
        returned = checkpointer.save(2, numbers(1)).result()
    assert waited.blocked_s >= waited.phases["commit"] + waited.phases["write"]
    assert returned.blocked_s < returned.seconds
    found = [unickpt.open(tmp_path / f"step_{n}").timing for n in (1, 2)]
    assert found[0] is not None
    assert found[1] is not None
    assert found[0].blocked[0] == 0, "which stands for all of it"
    assert found[1].blocked[0] == pytest.approx(returned.blocked_s, abs=1e-6)


def test_a_slow_process_is_the_one_that_was_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = writer.ChunkWriter.write_all

    def slow(self: writer.ChunkWriter, items: Any) -> Record:
        if self._attempt.group.index == 2:
            time.sleep(0.5)
        return real(self, items)

    monkeypatch.setattr(writer.ChunkWriter, "write_all", slow)
    save_in_job(tmp_path, 4, tree)
    found = unickpt.open(tmp_path).timing
    assert found is not None
    assert found.slowest[0] == 2
    assert found.seconds["write"][2] > 0.5
    assert found.waited[2] == 0
    assert found.collected >= found.done[2] - 1e-3


def test_copies_keep_it_and_equal_data_does_not_differ_by_it(tmp_path: Path) -> None:
    save_in_job(tmp_path / "a", 2, tree)
    save_in_job(tmp_path / "b", 2, tree)
    unickpt.copy(tmp_path / "a", tmp_path / "c")
    a, b, c = (unickpt.open(tmp_path / name) for name in "abc")
    assert a.timing is not None
    assert timing.encode(a.timing) == timing.encode(c.timing or b.timing)  # type: ignore[arg-type]
    assert a.reader.chunks.read_key(TIMING_KEY) != b.reader.chunks.read_key(TIMING_KEY)  # type: ignore[attr-defined]
    assert unickpt.diff(tmp_path / "a", tmp_path / "b").same
    for name in "abc":
        assert unickpt.verify(tmp_path / name).ok
    save_in_job(tmp_path / "d", 2, lambda index: {"w": np.ones(9)})
    unickpt.convert(tmp_path / "d", tmp_path / "e")
    assert unickpt.open(tmp_path / "e").timing is None, "of one process, and nobody requested it"


# --- clocks ---------------------------------------------------------------------------------------


class Clock:
    """Seconds that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def record(began: float, wrote_s: float) -> Record:
    """Of a process that began at a moment of its host's clock."""
    statistics = {"began": began, "write_at": 0.0, "write_s": wrote_s, "bytes": 8.0}
    return Record(0, np.zeros(0, CHUNK_DTYPE), statistics=statistics)


def test_what_the_coordinator_saw_corrects_the_hosts_clocks() -> None:
    clock = Clock()
    arrivals = Arrivals(4, clock)
    clock.now = 101  # the coordinator was asked at 100
    arrivals.published()
    for now, late in ((101.0, [1, 2, 3]), (105.0, [2, 3]), (106.0, [3]), (120.0, [])):
        clock.now = now
        arrivals.looked(late)
    records = [
        (0, record(5000, 1)),
        (1, record(5000.5, 3)),  # done at 3.5, by its clock: between 1 and 5, where it was seen
        (2, record(1400, 2)),  # a clock an hour behind: seen between 5 and 6
        (3, record(9000, 9)),  # one an hour ahead: between 6 and 20
    ]
    clock.now = 121
    found = arrivals.timing([each.statistics for _, each in records])
    np.testing.assert_allclose(found.done, [1, 3.5, 5, 20], atol=1e-5)
    np.testing.assert_allclose(found.began, [0, 0.5, 3, 11], atol=1e-5)
    assert (found.collected, found.merged) == (20, 21)


def test_further_records_do_not_count_as_the_last(tmp_path: Path) -> None:
    clock = Clock()
    arrivals = Arrivals(2, clock)
    arrivals.published()
    arrivals.looked([1])
    clock.now = 4
    arrivals.looked([])
    clock.now = 9
    arrivals.looked([1])  # the coordinator has asked for chunks that process 1 holds
    arrivals.looked([])
    assert arrivals.collected == 4


# --- the table ------------------------------------------------------------------------------------


def many(processes: int) -> Timing:
    rng = np.random.default_rng(0)
    columns = {
        "began": rng.normal(0, 0.01, processes),
        "write_at": rng.random(processes),
        "write_s": rng.random(processes) * 60,
        "describe_s": rng.random(processes),
        "written": rng.integers(0, 1 << 40, processes),
    }
    return timing.from_columns(61.0, 62.0, columns, processes)


def test_a_table_reads_back_as_it_was_and_is_small() -> None:
    before = many(4096)
    data = timing.encode(before)
    after = timing.decode(data, 4096)
    assert len(data) < 4096 * 26
    for field in dataclasses.fields(Timing):
        np.testing.assert_equal(getattr(after, field.name), getattr(before, field.name))
    assert set(after.at) == set(after.seconds) == set(PHASES)
    assert not after.reused.any()


def sealed(head: Any, rest: bytes) -> bytes:
    body = json.dumps(head).encode() + b"\n" + rest
    return body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")


SOUND = {"processes": 2, "collected": 1.0, "merged": 1.0, "columns": [["write_s", "<f4"]]}
TWO = np.ones(2, "<f4").tobytes()


def test_columns_of_a_later_version_are_skipped() -> None:
    columns = [["later", "<u8"], ["write_s", "<f4"]]
    data = sealed({**SOUND, "columns": columns, "more": 1}, np.ones(2, "<u8").tobytes() + TWO)
    assert timing.decode(data, 2).seconds["write"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("changed", "rest", "reason"),
    [
        ({}, TWO + b"x", "9 bytes"),
        ({}, b"", "0 bytes"),
        ({"processes": 3}, TWO, "of 3 processes"),
        ({"processes": True}, TWO, "of True processes"),
        ({"columns": []}, b"", "columns are malformed"),
        ({"columns": [["write_s", "<f4"]] * 2}, TWO * 2, "columns are malformed"),
        ({"columns": [["write_s", "O"]]}, TWO * 2, "head is malformed"),
        ({"columns": [["write_s", {}]]}, TWO * 2, "head is malformed"),
        ({"columns": [["write_s", "<u8"]]}, TWO * 2, "another type"),
        ({"columns": 7}, TWO, "head is malformed"),
        ({"collected": "x"}, TWO, "head is malformed"),
        ({"collected": float("nan")}, TWO, "not finite"),
        ({"merged": 1e300}, TWO, "not finite"),
        ({"columns": [[f"c{i}", "<f4"] for i in range(64)]}, TWO * 64, "columns are malformed"),
        ({"x": "y" * 20_000}, TWO, "its head has"),
        ({}, np.array([1, np.nan], "<f4").tobytes(), "times that cannot be"),
        ({}, np.array([1, -1], "<f4").tobytes(), "times that cannot be"),
        ({}, np.array([1, np.inf], "<f4").tobytes(), "times that cannot be"),
    ],
)
def test_a_hostile_table_is_refused(changed: Any, rest: bytes, reason: str) -> None:
    assert timing.decode(sealed(SOUND, TWO), 2).processes == 2
    with pytest.raises(ValueError, match=reason):
        timing.decode(sealed({**SOUND, **changed}, rest), 2)


def test_every_flipped_bit_of_a_table_is_noticed() -> None:
    data = sealed(SOUND, TWO)
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1
        with pytest.raises(ValueError, match="checksum"):
            timing.decode(bytes(flipped), 2)


def stored(path: Path) -> dict[str, bytes]:
    """All keys of a checkpoint without chunks."""
    unickpt.save(path, {"step": 1}, options=SaveOptions(timing=True))
    store = unickpt.open(path).reader.chunks.database.store()  # type: ignore[attr-defined]
    return {key.decode(): store.read(key.decode()).result().value for key in store.list().result()}


@pytest.mark.parametrize("kind", ["damaged", "huge", "none"])
def test_a_checkpoint_with_a_bad_timing_is_read_and_verify_says_so(
    kind: str, tmp_path: Path
) -> None:
    keys = stored(tmp_path / "a")
    if kind == "none":
        del keys[TIMING_KEY]
    else:
        keys[TIMING_KEY] = b"x" * (timing.most_bytes(1) + 1 if kind == "huge" else 100)
    (tmp_path / "b").mkdir()
    forge(tmp_path / "b", keys, plain=True)
    assert unickpt.load(tmp_path / "b") == {"step": 1}
    if kind == "none":
        assert unickpt.open(tmp_path / "b").timing is None
        assert unickpt.verify(tmp_path / "b").ok
        return
    reason = f"has {len(keys[TIMING_KEY])} bytes" if kind == "huge" else "checksum"
    with pytest.raises(unickpt.CheckpointCorrupt, match=rf"unickpt\.timing.* {reason}"):
        unickpt.open(tmp_path / "b").timing  # noqa: B018
    (damage,) = unickpt.verify(tmp_path / "b").damage
    assert "unickpt.timing" in damage.reason


def test_a_save_whose_statistics_are_nonsense_is_not_kept_from_committing(tmp_path: Path) -> None:
    """They are for people: nothing may fail because of them."""
    clock = Clock()
    arrivals = Arrivals(2, clock)
    arrivals.published()
    arrivals.looked([])
    strange = dataclasses.replace(record(0, 1), statistics={"began": float("nan"), "bytes": 1e300})
    found = arrivals.timing([record(0, 1).statistics, strange.statistics])
    assert timing.decode(timing.encode(found), 2).processes == 2


def test_a_save_of_another_number_of_processes_has_its_own(tmp_path: Path) -> None:
    for count in (3, 2):
        save_in_job(tmp_path, count, tree, overwrite=count == 2)
        found = unickpt.open(tmp_path).timing
        assert found is not None
        assert found.processes == count


def test_it_costs_no_look_at_the_storage_when_a_checkpoint_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unickpt.save(tmp_path, {"w": np.ones(3)}, options=SaveOptions(timing=True))
    monkeypatch.setattr(timing, "decode", None)
    assert unickpt.load(tmp_path)["w"].tolist() == [1, 1, 1]


# --- observers ----------------------------------------------------------------------------------


class Tracer(SaveFeature):
    """Notes all that it is told of saves."""

    name = "tracer"

    def __init__(self, fails: bool = False) -> None:
        self.phases: list[tuple[str, float, float]] = []
        self.reports: list[Any] = []
        self.fails = fails

    def observer(self) -> Tracer:
        return self

    def phase(self, name: str, began: float, ended: float) -> None:
        self.phases.append((name, began, ended))
        if self.fails:
            raise RuntimeError("the tracer is away")

    def committed(self, report: Any) -> None:
        self.reports.append(report)
        if self.fails:
            raise RuntimeError("the tracer is away")


@pytest.mark.parametrize("fails", [False, True])
def test_a_feature_sees_the_phases_and_the_commit(
    tmp_path: Path, fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    tracer = Tracer(fails)
    options = SaveOptions(features=[tracer], fsync=False)
    before = time.perf_counter()
    first = unickpt.save(tmp_path / "a", {"w": np.ones(3)}, options=options)
    second = unickpt.save_async(tmp_path / "b", {"w": np.ones(3)}, options=options).result()
    assert [report.url for report in tracer.reports] == [first.url, second.url]
    seen = {name for name, _, _ in tracer.phases[: len(first.phases)]}
    assert seen == first.phases.keys() == {"describe", "plan", "write", "commit"}
    rest = {name: ended - began for name, began, ended in tracer.phases[len(first.phases) :]}
    assert rest == pytest.approx(second.phases, abs=1e-9)
    for _, began, ended in tracer.phases:
        assert before <= began <= ended <= time.perf_counter()
    assert ("the tracer is away" in caplog.text) == fails
    assert unickpt.verify(tmp_path / "b").ok


def test_every_process_is_told_and_process_0_of_all(tmp_path: Path) -> None:
    tracers = [Tracer(), Tracer()]

    def save(group: unickpt.ProcessGroup) -> None:
        options = SaveOptions(group=group, features=[tracers[group.index]], fsync=False)
        unickpt.save(tmp_path / "c", tree(group.index), options=options)

    assert in_job(2, save) == [None, None]
    assert [len(tracer.reports[0].writers) for tracer in tracers] == [2, 0]


def test_of_several_processes_it_is_kept_unless_it_is_refused(tmp_path: Path) -> None:
    def save(group: unickpt.ProcessGroup) -> None:
        options = SaveOptions(group=group, timing=False, fsync=False)
        unickpt.save(tmp_path / "c", tree(group.index), options=options)

    assert in_job(2, save) == [None, None]
    assert unickpt.open(tmp_path / "c").timing is None
    assert unickpt.verify(tmp_path / "c").ok
