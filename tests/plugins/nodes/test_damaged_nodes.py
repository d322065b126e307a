"""Files that are damaged or gone on nodes that live: read, and uploaded, from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.processes import Processes
from test_nodes import OPTIONS, Cluster, state

import unickpt
from unickpt import Checkpointer, SaveOptions
from unickpt.errors import CheckpointCorrupt
from unickpt.extend import Damaged
from unickpt.plugins.nodes.other_sources import WHOLE, OtherSource

PROTECTIONS: dict[str, Any] = {
    "replicas": {"arguments": {"replicas": 1}},
    "parity": {"options": {"parity": (8, 1)}},
}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1  # in the middle may be padding of a chunk
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def empty(path: Path) -> None:
    path.write_bytes(b"")


WHAT = {flip: "array '[vw]' ", truncate: "array ", empty: "array ", Path.unlink: "it is gone"}
DAMAGES = [*WHAT]


def pairs(others: int) -> list[Any]:
    """Each protection with each damage: two tests share them, and `make soak` runs all in both.

    Arguments:
        others: 0 or 1, of the two tests.
    """
    return [
        pytest.param(
            protection, way, marks=[pytest.mark.slow] if (row + column) % 2 != others else []
        )
        for row, protection in enumerate(PROTECTIONS)
        for column, way in enumerate(DAMAGES)
    ]


@pytest.fixture
def cluster(processes: Processes, tmp_path: Path) -> Cluster:
    return Cluster(processes, tmp_path)


def damage(cluster: Cluster, node: str, step: int, process: int, way: Callable[..., Any]) -> None:
    """Damages the data files of a process on a node."""
    files = list(cluster.path(node).glob(f"*/step_{step}/processes/*/{process:05d}/d/*"))
    assert files
    for file in files:
        way(file)


def settings(protection: str, **arguments: Any) -> dict[str, Any]:
    chosen = PROTECTIONS.get(protection, {})
    return {**chosen, "arguments": {**arguments, **chosen.get("arguments", {})}}


@pytest.mark.integration
@pytest.mark.parametrize(("protection", "way"), pairs(0))
def test_damaged_files_are_read_from_copies_and_sums(
    protection: str, way: Callable[..., Any], cluster: Cluster
) -> None:
    order = settings(protection, upload_every=99)
    cluster.run(["a", "b", "c"], save=2, then="kill", waits=1, **order)
    damage(cluster, "b", 1, 1, way)
    # By the node itself, and by others.
    cluster.run(["a", "b", "c"], load=1, then="stop", **order)
    cluster.run(["b", "c"], "jax", load=1, then="stop", **order)
    assert cluster.in_root() == []


@pytest.mark.integration
@pytest.mark.parametrize("way", DAMAGES)
def test_a_damaged_file_that_nothing_else_has_is_named(
    way: Callable[..., Any], cluster: Cluster
) -> None:
    order = settings("none", upload_every=99)
    cluster.run(["a", "b"], save=1, then="kill", **order)
    damage(cluster, "a", 0, 0, way)
    text = r"step_0: array '[vw]' \[.*/00000/d/.*the node at .*:\d+: damaged or gone, and no other"
    cluster.run(["b", "a"], error=text, **order)
    cluster.run(["a", "b"], error=text, **order)


@pytest.mark.integration
@pytest.mark.parametrize(("protection", "way"), pairs(1))
def test_damaged_files_are_uploaded_from_copies_and_sums(
    protection: str, way: Callable[..., Any], cluster: Cluster
) -> None:
    order = settings(protection, upload_every=99)
    cluster.run(["a", "b", "c"], save=1, then="kill", waits=1, **order)
    damage(cluster, "b", 0, 1, way)
    cluster.run(["a", "b", "c"], load=0, save=1, **settings(protection))
    assert cluster.in_root() == [0, 1]
    for step in cluster.in_root():
        assert unickpt.verify(f"{cluster.root}/step_{step}").ok


@pytest.mark.integration
@pytest.mark.parametrize("way", DAMAGES)
def test_a_damaged_step_costs_neither_the_run_nor_later_steps(
    way: Callable[..., Any], cluster: Cluster
) -> None:
    cluster.run(["a", "b"], save=2, then="kill", arguments={"upload_every": 99})
    damage(cluster, "b", 0, 1, way)
    # At once: the job would be killed before the time limit of its saves.
    options = {"timeout_s": 600}
    outputs = cluster.run(["a", "b"], load=1, save=3, refused=True, options=options)
    assert cluster.in_root() == [1, 2, 3, 4]
    for said in outputs:
        text = rf"step_0 is not uploaded: process 1 has a damaged file \({WHAT[way]}"
        assert re.search(text + rf".*{cluster.path('b')}/.*/step_0/", said), said


# --- one process --------------------------------------------------------------------------------


def saved(
    tmp_path: Path, tree: dict[str, Any], options: SaveOptions, way: Callable[[Path], Any]
) -> tuple[Path, Checkpointer]:
    """A step on a node, with damaged files, and the run that is to upload it."""
    root, node = tmp_path / "root", tmp_path / "node"
    run = Checkpointer(root, node_local=node, upload_every=99, options=options)
    run.save(1, tree, wait=True)
    run.wait()
    run._steps.close()  # as if the job were killed
    for file in node.glob("*/step_1/processes/*/00000/d/*"):
        way(file)
    return root, Checkpointer(root, node_local=node, options=options)


@pytest.mark.parametrize("compression", [None, "auto"])
def test_what_is_uploaded_is_compared_with_digests(tmp_path: Path, compression: Any) -> None:
    options = SaveOptions(fsync=False, chunk_bytes=4096, compression=compression)
    root, run = saved(tmp_path, state(1), options, flip)
    run.save(2, state(2))  # no error stops the run
    with pytest.raises(CheckpointCorrupt, match=r"step_1 is not uploaded.*\(array 'w' \["):
        run.wait()
    run.save(3, state(3))
    run.close()
    assert Checkpointer(root).steps() == [2, 3]


def test_per_process_values_are_compared(tmp_path: Path) -> None:
    tree = {"loader": unickpt.PerProcess({"order": list(range(30_000))})}
    root, run = saved(tmp_path, tree, OPTIONS, flip)
    with pytest.raises(CheckpointCorrupt, match=r"\(the value of process 0 for 'loader'\)"):
        run.close()
    assert Checkpointer(root).steps() == []


@pytest.mark.parametrize("way", DAMAGES)
def test_a_damaged_file_is_read_from_the_root_and_no_others(
    way: Callable[..., Any], tmp_path: Path
) -> None:
    root, node = tmp_path / "root", tmp_path / "node"
    tree = {f"layer_{n}": np.full(2000, n) for n in range(20)}
    options = SaveOptions(fsync=False, chunk_bytes=4096, parity=(4, 1))  # several files
    with Checkpointer(root, node_local=node, options=options) as run:
        run.save(1, tree, wait=True)
        run.wait()
        first, *others = sorted(node.glob("*/step_1/processes/*/00000/d/*"))
        assert others
        way(first)
        for name in [path.name for path in others]:
            next(root.glob(f"step_1/**/{name}")).unlink()
        loaded = run.load(tree)
    assert all((loaded[name] == value).all() for name, value in tree.items())


@pytest.mark.parametrize("data", [b"", b"1234567", b"123456789"])
def test_a_source_that_answers_with_another_number_of_bytes_is_not_used(data: bytes) -> None:
    class Short(OtherSource):
        def fetch(self, process: int, name: str, part: slice = WHOLE) -> bytes:
            return data

    source = Short("run/step_1", {3: "the node at a:1"})
    text = rf"d/x: the node at a:1: {len(data)} bytes, 8 expected"
    with pytest.raises(Damaged, match=text):
        source.read("processes/attempt/00003/d/x", 0, 8)
    assert source.read("processes/attempt/00004/d/x", 0, 8) is None
