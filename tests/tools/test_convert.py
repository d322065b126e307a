"""convert: what arrives, within which memory, by how many processes, and what is recorded of it."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.counts import ChunkRead
from support.processes import Processes
from support.rule_cases import flat_names
from support.saving import in_job

import unickpt
from unickpt import CheckpointCorrupt, LoadMismatch, Rules, SaveOptions
from unickpt.errors import CheckpointReplaced, ProcessFailed, RuleError
from unickpt.rules.provenance import Provenance

RULES = """
    layers/up [l i o]    <-> layers.{l}.up [o i]
    norm [e] + 1         <-> norm [e]
    emb [(v + _) e]      <-> wte [v e] = head [v e]    v=13
    step                 <-> step
"""


def tree(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    emb = rng.random((16, 7), np.float32)
    emb[13:] = 0
    up = rng.random((3, 40, 56), np.float32)
    return {"layers": {"up": up}, "norm": np.arange(7, dtype=np.float32), "emb": emb, "step": 5}


def same(a: Path, b: Path) -> bool:
    found = unickpt.diff(a, b)
    return found.same and not found.differences


def test_there_and_back(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "a", tree(), metadata={"run": "x"})
    rules = Rules.parse(RULES)
    report = unickpt.convert(tmp_path / "a", tmp_path / "b", rules=rules)
    assert (report.arrays, report.processes) == (5, 1)
    loaded = unickpt.load(tmp_path / "a", rules=rules)
    stored = unickpt.load(tmp_path / "b")
    assert loaded.keys() == stored.keys()
    for name, value in flat_names(stored).items():
        assert np.array_equal(value, flat_names(loaded)[name])
    assert stored["wte"] is stored["head"]
    assert unickpt.open(tmp_path / "b").metadata["run"] == "x"
    # The size of the padding is recorded: the way back needs nothing else.
    unickpt.convert(tmp_path / "b", tmp_path / "c", rules=rules.inverse)
    assert same(tmp_path / "a", tmp_path / "c")


@pytest.mark.parametrize("name", ["c", "c.npz"])
def test_processes_that_open_different_sources_write_no_mixture(name: str, tmp_path: Path) -> None:
    """As when a save replaces the source in between."""
    for number in range(2):
        (tmp_path / f"{number}").mkdir()
        path, x = tmp_path / f"{number}" / name, np.full((300, 200), float(number))
        np.savez(path, x=x) if name == "c.npz" else unickpt.save(path, {"x": x})

    def run(group: unickpt.ProcessGroup) -> Any:
        mine = SaveOptions(group=group, timeout_s=20, fsync=False, chunk_bytes=1 << 14)
        return unickpt.convert(tmp_path / f"{group.index}" / name, tmp_path / "to", options=mine)

    first, second = in_job(2, run)
    assert isinstance(first, CheckpointReplaced)
    assert isinstance(second, ProcessFailed)
    for error in (first, second):
        assert f"{tmp_path / '0' / name} and {tmp_path / '1' / name}" in str(error)
    assert not (tmp_path / "to").exists()


def test_without_rules_it_is_stored_anew(tmp_path: Path) -> None:
    """Other chunks, compressed, of a tree with containers of all kinds."""
    state = {"a": [np.arange(3000.0), (np.ones(2), None)], "b": {1: "x", "2": 2.5}}
    state["tied"] = state["a"][0]  # type: ignore[index]
    unickpt.save(tmp_path / "a", state)
    options = SaveOptions(chunk_bytes=512, compression="zstd")
    unickpt.convert(tmp_path / "a", tmp_path / "b", options=options)
    assert same(tmp_path / "a", tmp_path / "b")
    a, b = unickpt.open(tmp_path / "a"), unickpt.open(tmp_path / "b")
    assert a.index.tree == b.index.tree
    assert a.index.aliases == b.index.aliases
    assert b.index.codecs == ["zstd"]
    assert len(b["a/0"].parts[0].grid) == 1
    assert b["a/0"].chunk == (64,)


@pytest.mark.parametrize("budget", [1 << 20, 64 << 20])
def test_a_model_larger_than_the_budget(
    budget: int, tmp_path: Path, chunk_reads: list[ChunkRead]
) -> None:
    """All of it arrives; arrays that fit into a slab are read once."""
    rng = np.random.default_rng(3)
    state = {
        "up": rng.random((8, 256, 512), np.float32),
        "wide": rng.random((1024, 512), np.float32),
    }
    small = SaveOptions(chunk_bytes=32 << 10, fsync=False)
    unickpt.save(tmp_path / "a", state, options=small)
    rules = Rules.parse("up [l i o] <-> up.{l} [o i]\nwide [i o] <-> wide [o i]")
    options = SaveOptions(budget_bytes=budget, chunk_bytes=32 << 10, fsync=False)
    unickpt.convert(tmp_path / "a", tmp_path / "b", rules=rules, options=options, verify=False)
    read = sum(chunk.nbytes for chunk in chunk_reads)
    total = sum(x.nbytes for x in state.values())
    assert read == total if budget > total else read < 16 * total
    unickpt.convert(tmp_path / "b", tmp_path / "c", rules=rules.inverse, options=options)
    assert same(tmp_path / "a", tmp_path / "c")


def test_two_processes_of_jax_share_the_work(processes: Processes, tmp_path: Path) -> None:
    unickpt.save(tmp_path / "a", tree(), options=SaveOptions(chunk_bytes=1000))
    (tmp_path / "r").write_text(RULES)
    source = """
        import sys, unickpt
        a, b, rules = sys.argv[1:]
        options = unickpt.SaveOptions(chunk_bytes=1000)
        report = unickpt.convert(a, b, rules=unickpt.Rules.load(rules), options=options)
        assert report.processes == 2 and report.chunks > 2, report
    """
    arguments = tmp_path / "a", tmp_path / "b", tmp_path / "r"
    processes.finish(processes.jax(2, 1, textwrap.dedent(source), *arguments))
    unickpt.convert(tmp_path / "a", tmp_path / "alone", rules=Rules.parse(RULES))
    assert same(tmp_path / "alone", tmp_path / "b")


def test_four_processes_share_the_work(processes: Processes, tmp_path: Path) -> None:
    unickpt.save(tmp_path / "a", tree(), options=SaveOptions(chunk_bytes=1000))
    (tmp_path / "r").write_text(RULES)
    source = """
        import json, sys, torch.distributed as dist, unickpt
        dist.init_process_group("gloo")
        a, b, rules = sys.argv[1:]
        options = unickpt.SaveOptions(chunk_bytes=1000)
        report = unickpt.convert(a, b, rules=unickpt.Rules.load(rules), options=options)
        print(json.dumps([report.processes, report.chunks, report.written_bytes]))
        dist.destroy_process_group()
    """
    jobs = processes.torch(
        4, textwrap.dedent(source), tmp_path / "a", tmp_path / "b", tmp_path / "r"
    )
    told = [json.loads(out.splitlines()[-1]) for out in processes.finish(jobs)]
    assert {count for count, _, _ in told} == {4}
    assert min(chunks for _, chunks, _ in told) > 2
    stored = unickpt.open(tmp_path / "b")
    assert sum(nbytes for _, _, nbytes in told) == stored.nbytes
    unickpt.convert(tmp_path / "a", tmp_path / "alone", rules=Rules.parse(RULES))
    assert same(tmp_path / "alone", tmp_path / "b")


def test_refused_before_anything_is_written(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "a", tree())
    with pytest.raises(RuleError, match="'step'"):
        unickpt.convert(
            tmp_path / "a", tmp_path / "b", rules=Rules.parse(RULES.replace("step  ", "stop  "))
        )
    assert not (tmp_path / "b").exists()
    unickpt.convert(tmp_path / "a", tmp_path / "b", rules=Rules.parse(RULES))
    with pytest.raises(unickpt.CheckpointExists):
        unickpt.convert(tmp_path / "a", tmp_path / "b", rules=Rules.parse(RULES))
    unickpt.convert(tmp_path / "a", tmp_path / "b", rules=Rules.parse(RULES), overwrite=True)


def test_damage_in_the_source_is_found(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "a", tree())
    (data,) = (tmp_path / "a" / "processes").rglob("d/*")
    damaged = bytearray(data.read_bytes())
    at = damaged.find(tree()["layers"]["up"][1].tobytes()[:64])
    damaged[at] ^= 1
    data.write_bytes(damaged)
    with pytest.raises(CheckpointCorrupt, match=r"'layers/up'.*do not match their digest"):
        unickpt.convert(tmp_path / "a", tmp_path / "b", rules=Rules.parse(RULES))
    with pytest.raises(unickpt.CheckpointNotFound):
        unickpt.open(tmp_path / "b")


def test_per_process_leaves_need_as_many_processes(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "a", {"w": np.ones(2), "rng": unickpt.PerProcess({"seed": 3})})
    unickpt.convert(tmp_path / "a", tmp_path / "b")
    assert unickpt.load(tmp_path / "b")["rng"].values == ({"seed": 3},)
    two = unickpt.ProcessGroup(0, 2, "x" * 32)
    with pytest.raises(
        LoadMismatch, match=r"'rng' was saved by 1 processes, and 2 convert it.*rng <-> drop"
    ):
        unickpt.convert(tmp_path / "a", tmp_path / "c", options=SaveOptions(group=two))


def test_progress_ends_at_all_bytes(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "a", tree())
    seen: list[tuple[int, int]] = []
    rules = Rules.parse(RULES)
    unickpt.convert(tmp_path / "a", tmp_path / "b", rules=rules, progress=lambda *s: seen.append(s))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1] == unickpt.open(tmp_path / "b").nbytes


# --- what is recorded ---------------------------------------------------------------------------


def test_arithmetic_is_not_done_twice(tmp_path: Path) -> None:
    """Names alone do not tell that an offset has been added."""
    rules = Rules.parse("norm [e] * 2 + 1 <-> norm [e]")
    unickpt.save(tmp_path / "a", {"norm": np.arange(5.0)})
    unickpt.convert(tmp_path / "a", tmp_path / "b", rules=rules)
    with pytest.raises(RuleError, match=r"'norm' was converted already, to 2 \* x \+ 1"):
        unickpt.convert(tmp_path / "b", tmp_path / "c", rules=rules)
    with pytest.raises(RuleError, match="a second time"):
        unickpt.load(tmp_path / "b", rules=rules)
    unickpt.convert(tmp_path / "b", tmp_path / "c", rules=rules.inverse)
    assert unickpt.load(tmp_path / "c")["norm"].tolist() == [0, 1, 2, 3, 4]
    assert unickpt.open(tmp_path / "c").metadata == {}
    unickpt.convert(tmp_path / "c", tmp_path / "d", rules=rules)
    # Moves keep the record.
    unickpt.convert(tmp_path / "b", tmp_path / "m", rules=Rules.parse("norm <-> scale"))
    assert Provenance.from_metadata(unickpt.open(tmp_path / "m").metadata, "").arithmetic == {
        "scale": {(2, 1)}
    }


def test_pieces_with_different_arithmetic(tmp_path: Path) -> None:
    """As of a fused projection whose queries alone are scaled: not twice, but back."""
    rules = Rules.parse("q [a] * 2, k [b] <-> qk [(a + b)]")
    unickpt.save(tmp_path / "a", {"q": np.arange(2.0), "k": np.arange(3.0)})
    unickpt.convert(tmp_path / "a", tmp_path / "b", rules=rules)
    back = Rules.parse("q [a] * 2, k [b] <-> qk [(a + b)]", sizes={"a": 2}).inverse
    unickpt.convert(tmp_path / "b", tmp_path / "c", rules=back)
    assert same(tmp_path / "a", tmp_path / "c")
    assert unickpt.open(tmp_path / "c").metadata == {}
    unickpt.convert(tmp_path / "b", tmp_path / "m", rules=Rules.parse("qk <-> attn.qk"))
    twice = Rules.parse("attn.qk [(a + b)] <-> q [a] / 2, k [b]  a=2")
    with pytest.raises(RuleError, match=r"'attn.qk' was converted already, to 2 \* x \+ 0; these"):
        unickpt.load(tmp_path / "m", rules=twice)
    alone = Rules.parse("attn.qk [(a + b)] <-> q [a] * 2, k [b]  a=2")
    assert unickpt.load(tmp_path / "m", rules=alone)["q"].tolist() == [0, 1]


def test_conventions_are_recorded_and_held(tmp_path: Path) -> None:
    rules = Rules.parse("convention rope: interleaved <-> half\nw [(p h)] <-> w [(h p)]  h=2")
    unickpt.save(tmp_path / "a", {"w": np.arange(6)})
    unickpt.convert(tmp_path / "a", tmp_path / "b", rules=rules)
    with pytest.raises(
        RuleError, match=r"'rope' is 'half', and the rules are for 'interleaved' \(they"
    ):
        unickpt.convert(tmp_path / "b", tmp_path / "c", rules=rules)
    with pytest.raises(RuleError, match="they have been applied already"):
        unickpt.load(tmp_path / "b", {"w": np.zeros(6, int)}, rules=rules)
    unickpt.convert(tmp_path / "b", tmp_path / "c", rules=rules.inverse)
    assert unickpt.load(tmp_path / "c")["w"].tolist() == list(range(6))


@pytest.mark.parametrize(
    "record",
    [
        {"conventions": 3},
        {"arithmetic": {"a": 1}},
        {"pieces": {"a": [1]}},
        {"sizes": {"a": {"v": "x"}}},
    ],
)
def test_a_record_that_is_none(record: Any, tmp_path: Path) -> None:
    unickpt.save(tmp_path / "a", {"w": np.ones(2)}, metadata={"unickpt": {"conversion": record}})
    with pytest.raises(CheckpointCorrupt, match="the record of its conversion"):
        unickpt.load(tmp_path / "a", rules=Rules.parse("w <-> w"))


# --- diff ---------------------------------------------------------------------------------------


def test_diff_tells_what_differs(tmp_path: Path) -> None:
    a = {"same": np.arange(4), "value": np.array([1.0, 2, np.nan]), "shape": np.ones(3), "n": 3,
         "dtype": np.ones(2, np.float32), "gone": np.ones(1), "kind": 1, "x": np.nan}  # fmt: skip
    b = {"same": np.arange(4), "value": np.array([1.0, 2.5, np.nan]), "shape": np.ones(4), "n": 4,
         "dtype": np.ones(2, np.float64), "new": np.ones(1), "kind": "1", "x": np.nan}  # fmt: skip
    unickpt.save(tmp_path / "a", a)
    unickpt.save(tmp_path / "b", b)
    found = unickpt.diff(tmp_path / "a", tmp_path / "b")
    assert not found.same
    rows = {row.name: (row.problem, row.first, row.second) for row in found.differences}
    assert rows == {
        "value": ("value", "", "of 3"),
        "shape": ("shape", "float64[3]", "float64[4]"),
        "dtype": ("dtype", "float32", "float64"),
        "gone": ("unexpected", "float64[1]", "-"),
        "new": ("missing", "-", "float64[1]"),
        "kind": ("value", "1", "'1'"),
        "n": ("value", "3", "4"),
    }
    (value,) = [row for row in found.differences if row.name == "value"]
    assert (value.unequal, value.max_abs, value.max_rel) == (1, 0.5, 0.2)


def test_diff_reads_only_what_digests_leave_open(
    tmp_path: Path, chunk_reads: list[ChunkRead]
) -> None:
    state = {"a": np.arange(1000), "b": np.arange(500.0)}
    unickpt.save(tmp_path / "a", state)
    unickpt.save(tmp_path / "b", state)
    unickpt.save(tmp_path / "c", state, options=SaveOptions(chunk_bytes=512))
    assert same(tmp_path / "a", tmp_path / "b")
    unickpt.save(tmp_path / "r", {"x/y": state["a"], "b": state["b"]})
    rules = Rules.parse("a <-> x%2Fy\nb <-> b")
    assert unickpt.diff(tmp_path / "a", tmp_path / "r", rules=rules).same
    assert chunk_reads == []
    found = unickpt.diff(tmp_path / "a", tmp_path / "c")
    assert found.same
    assert found.read_bytes == 12000


def test_diff_through_rules_finds_a_flipped_bit(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "a", tree())
    rules = Rules.parse(RULES)
    made = unickpt.load(tmp_path / "a", rules=rules)
    made["layers.1.up"].view(np.uint32)[5, 7] ^= 1
    unickpt.save(tmp_path / "b", made)
    (row,) = unickpt.diff(tmp_path / "a", tmp_path / "b", rules=rules).differences
    assert (row.name, row.problem, row.unequal) == ("layers.1.up", "value", 1)
    assert row.max_rel == pytest.approx(6e-8, rel=1)


def test_diff_of_layouts(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "a", {"w": np.ones((4, 2))})
    two = unickpt.types.LocalFragments(
        (4, 2), [(unickpt.types.Box((0, 0), (4, 2)), np.ones((4, 2)))]
    )
    unickpt.save(tmp_path / "b", {"w": two})
    assert unickpt.diff(tmp_path / "a", tmp_path / "b").differences == ()
    found = unickpt.diff(tmp_path / "a", tmp_path / "b", layout=True)
    assert found.same
    assert [row.problem for row in found.differences] == ["layout"]
