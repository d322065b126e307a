"""Nodes that are separate hosts: each has a name and an address, and is cut off for some seconds.

Real processes in network namespaces.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support import hosts
from support.hosts import Hosts
from support.processes import Processes
from test_nodes import JOB, Cluster

COUNT = 3
ENTER = """
import os
from support import hosts
number = int(os.environ["RANK"])
hosts.enter(os.environ["HOSTS"].split()[number], os.environ["HOST_NAMES"], number)
"""
PROTECTIONS = {
    "replicas": {"arguments": {"replicas": 1}},
    "parity": {"options": {"parity": (8, 1)}},
}

pytestmark = pytest.mark.integration


class HostCluster(Cluster):
    """Nodes of which each is a host."""

    def __init__(self, processes: Processes, folder: Path, hosts: Hosts) -> None:
        super().__init__(processes, folder)
        self.hosts = hosts

    def start(self, nodes: Any, kind: str = "torch", **order: Any) -> list[Any]:
        folders = [str(self.path(node)) for node in nodes]
        text = json.dumps([kind, self.root, folders, order])
        env = {
            "HOSTS": " ".join(map(self.hosts.namespace, range(len(nodes)))),
            "HOST_NAMES": self.hosts.names,
            "MASTER_ADDR": hosts.address(0),
        }
        return self.processes.torch(len(nodes), ENTER + JOB, text, env=env)

    def cut_when(self, number: int, mark: str, after_s: float, seconds: float) -> threading.Thread:
        """Cuts off a host some time after a file is there."""

        def cut() -> None:
            while not list(self.folder.glob(mark)):
                time.sleep(0.01)
            time.sleep(after_s)
            self.hosts.cut(number, seconds)

        thread = threading.Thread(target=cut, daemon=True)
        thread.start()
        return thread


@pytest.fixture
def cluster(processes: Processes, tmp_path: Path) -> Iterator[HostCluster]:
    with ExitStack() as stack:
        try:
            running = stack.enter_context(hosts.running(tmp_path, COUNT))
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces: {error}")
        yield HostCluster(processes, tmp_path, running)


@pytest.mark.parametrize("protection", PROTECTIONS)
def test_a_host_that_is_cut_off_while_others_protect_a_step(
    protection: str, cluster: HostCluster
) -> None:
    """The job goes on, and its last step survives the loss of the host."""
    settings: Any = PROTECTIONS[protection]
    seldom = {"upload_every": 99, **settings.get("arguments", {})}
    order: Any = {**settings, "arguments": seldom, "then": "stop", "waits": 1}
    cut = cluster.cut_when(1, "n1/*/step_1/processes/*/00001/d/*", 0.0, 4.5)
    out = cluster.run(["n0", "n1", "n2"], save=2, **order)
    cut.join()
    assert all("1: 'the loss of a node'" in text for text in out), out
    cluster.lose("n1")
    cluster.run(["n0", "n2"], load=1, **order)


@pytest.mark.slow
@pytest.mark.parametrize("protection", ["none", *PROTECTIONS])
@pytest.mark.parametrize("seconds", [2.0, 5.0])
def test_a_host_that_is_cut_off_while_a_job_resumes(
    seconds: float, protection: str, cluster: HostCluster
) -> None:
    settings: Any = PROTECTIONS.get(protection, {})
    seldom = {"upload_every": 99, **settings.get("arguments", {})}
    order: Any = {**settings, "arguments": seldom, "then": "stop"}
    cluster.run(["n0", "n1", "n2"], save=2, waits=1, **order)
    cut = cluster.cut_when(1, "resumes-1", 0.0, seconds)
    began = str(cluster.folder / "resumes")
    cluster.run(["n1", "n2", "n0"], load=1, save=1, began=began, **order)
    cut.join()
