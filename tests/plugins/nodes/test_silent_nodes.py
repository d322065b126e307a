"""Nodes that cannot be read at resume: what else has the bytes is read, soon; else they are named.

Real processes; in the place of the server of one node is one that fails.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.processes import Processes
from test_nodes import Cluster

FAULTS = ["silent", "refuses", "garbage", "vanishes"]
SOON_S = 100.0
"""Seconds here, where few cores are busy; TensorStore tries for minutes."""


@pytest.fixture
def cluster(processes: Processes, tmp_path: Path) -> Cluster:
    return Cluster(processes, tmp_path)


def check_soon(outputs: list[str]) -> None:
    seconds = [float(text.split("seconds")[1].split()[0]) for text in outputs]
    assert max(seconds) < SOON_S, seconds


@pytest.mark.integration
@pytest.mark.parametrize("fault", [*FAULTS, "lies"])
def test_the_root_is_read_in_the_place_of_a_node(fault: str, cluster: Cluster) -> None:
    cluster.run(["a", "b"], save=2)
    assert cluster.in_root() == [0, 1]
    outputs = cluster.run(["b", "a"], load=1, then="stop", fault=fault)
    check_soon(outputs)


@pytest.mark.integration
@pytest.mark.parametrize("fault", FAULTS)
def test_a_copy_is_read_in_the_place_of_a_node(fault: str, cluster: Cluster) -> None:
    settings: Any = {"arguments": {"upload_every": 99, "replicas": 1}}
    cluster.run(["a", "b", "c"], save=2, then="stop", waits=1, **settings)
    assert cluster.in_root() == []
    outputs = cluster.run(["c", "a", "b"], load=1, then="stop", fault=fault, **settings)
    check_soon(outputs)


@pytest.mark.integration
@pytest.mark.parametrize("fault", FAULTS)
def test_a_node_that_alone_has_files_is_named(fault: str, cluster: Cluster) -> None:
    cluster.run(["a", "b"], save=1, then="stop", arguments={"upload_every": 99})
    outputs = cluster.run(["b", "a"], error="has the files of processes", fault=fault)
    check_soon(outputs)


@pytest.mark.integration
def test_files_of_a_node_that_does_not_answer_are_restored_from_sums(cluster: Cluster) -> None:
    settings: Any = {"arguments": {"upload_every": 99}, "options": {"parity": (8, 1)}}
    cluster.run(["a", "b", "c"], save=2, then="stop", waits=1, **settings)
    text = cluster.run(["c", "a", "b"], load=1, then="stop", early_fault="silent", **settings)
    check_soon(text)
