"""What memory a node has, how many processes share it, and a process's share."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from support.processes import Processes

from unickpt import LoadOptions, ProcessGroup, SaveOptions
from unickpt.frameworks import host_memory
from unickpt.frameworks.host_memory import MemoryBudget, share
from unickpt.frameworks.memory_limits import node_memory
from unickpt.frameworks.process_group import NodeCount, launched_on_node

GIB = 1 << 30


def system(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    """A machine of 64 GiB, of which 40 are available."""
    files = {
        "proc/meminfo": f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {40 << 20} kB\n",
        "proc/sys/kernel/random/boot_id": "a-boot\n",
        "proc/self/cgroup": cgroup,
        **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def limits(root: Path, cgroup: str, files: dict[str, str]) -> tuple[float, float]:
    found = node_memory(system(root, cgroup, files))
    return found.total / GIB, found.available / GIB


V1 = "memory/docker/1/memory"


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/\n", {}, (64, 40)),
        ("", {}, (64, 40)),
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": "max\n"}, (64, 40)),
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": f"{16 * GIB}\n"}, (16, 16)),
        # In use are 10 GiB, of which 4 are pages of files; a limit of one above counts.
        (
            "0::/a/b\n",
            {
                "a/b/memory.max": f"{32 * GIB}\n",
                "a/memory.max": f"{16 * GIB}\n",
                "a/memory.current": f"{10 * GIB}\n",
                "a/memory.stat": f"anon {6 * GIB}\nactive_file {GIB}\ninactive_file {3 * GIB}\n",
            },
            (16, 10),
        ),
        ("0::/\n", {"memory.max": "max", "memory.high": str(8 * GIB)}, (8, 8)),
        ("0::/\n", {"memory.max": "what", "memory.current": "?"}, (64, 40)),
        # Version 1, in a container that sees only its own group, under another name.
        (
            "5:cpu:/x\n4:hugetlb,memory:/docker/1\n0::/\n",
            {
                "memory/memory.limit_in_bytes": f"{20 * GIB}\n",
                "memory/memory.usage_in_bytes": f"{18 * GIB}\n",
                "memory/memory.stat": f"total_active_file 0\ntotal_inactive_file {8 * GIB}\n",
            },
            (20, 10),
        ),
        (
            "4:memory:/docker/1\n",
            {
                f"{V1}.limit_in_bytes": "9223372036854771712",
                f"{V1}.usage_in_bytes": f"{6 * GIB}",
            },
            (64, 40),
        ),
    ],
)
def test_the_memory_of_a_node(
    cgroup: str, files: dict[str, str], expected: tuple[float, float], tmp_path: Path
) -> None:
    assert limits(tmp_path, cgroup, files) == expected


def test_containers_with_limits_of_their_own_are_different_nodes(tmp_path: Path) -> None:
    files = {"a/memory.max": str(8 * GIB), "b/memory.max": str(8 * GIB), "c/x": ""}
    names = [
        node_memory(system(tmp_path, f"0::/{of}\n", files)).name for of in ("a", "a", "b", "c", "d")
    ]
    assert names[0] == names[1]
    assert len({names[0], names[2], names[3]}) == 3
    assert names[3] == names[4] == "a-boot", "what has no limit shares the machine"


def test_a_share() -> None:
    assert share(1000, 8) == 125
    assert share(3, 8) == 1
    assert share(MemoryBudget(1000, "process"), 8) == 1000, "it is a process's already"
    assert share(None, 8, default=800) == 100
    assert share(None, 1) <= host_memory.MOST_WORKING
    assert MemoryBudget.from_option(1000).share(8) == 125
    assert MemoryBudget.from_option(None).share(8) == host_memory.MOST_WORKING
    memory = node_memory()
    assert 0 < host_memory.node_bytes() <= memory.total // 4


def test_options_divide_a_budget_among_the_processes_of_the_node() -> None:
    group = ProcessGroup(0, 8, "s", local_count=4)
    assert LoadOptions(budget_bytes=4000, group=group).working_bytes == 1000
    assert SaveOptions(budget_bytes=4000, group=ProcessGroup(0, 8, "s")).working_bytes == 500
    assert SaveOptions(budget_bytes=4000).working_bytes == 4000
    with pytest.raises(ValueError, match="local_count=9"):
        ProcessGroup(0, 8, "s", local_count=9)


@pytest.mark.parametrize(
    ("local", "world", "count", "expected"),
    [
        ("4", "8", 8, 4),
        ("4", "8", 1, 4),  # each process of the launcher saves alone
        ("4", "8", 3, None),  # another job, whose parent was launched
        ("", "8", 8, None),
        ("many", "8", 8, None),
        ("9", "8", 8, None),
        ("0", "8", 8, None),
    ],
)
def test_what_torchrun_says(
    local: str, world: str, count: int, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    monkeypatch.setenv("WORLD_SIZE", world)
    assert launched_on_node(count) == expected


class Memory:
    """Counters of a job of threads, on several nodes."""

    def __init__(self) -> None:
        self._values: dict[str, int] = {}
        self._lock, self._ready = threading.Lock(), threading.Event()
        self.calls = 0

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            self.calls += 1
            self._values[key] = self._values.get(key, 0) + amount
            return self._values[key]

    def announce(self, key: str) -> None:
        self._ready.set()

    def wait(self, key: str, seconds: float) -> None:
        self._ready.wait(0)


def test_processes_that_have_not_arrived_count_as_well() -> None:
    memory = Memory()
    counts = [NodeCount(memory, 4, "s", node) for node in ("a", "b", "a", "a")]
    expected = ([4], [3, 3], [3, 2, 3], [3, 1, 3, 3])
    for number, count in enumerate(counts):
        count.arrive()
        found_now = [other.at_most() for other in counts[: number + 1]]
        assert found_now == expected[number]
    before = memory.calls
    assert [count.at_most() for count in counts] == [3, 1, 3, 3]
    assert memory.calls == before, "the store is not asked again"


TORCH = """
import torch.distributed as dist, unickpt
from unickpt.frameworks.leaves import adapters
from unickpt.frameworks.process_group import current_group
from unickpt.frameworks.host_memory import processes_here
dist.init_process_group("gloo")
before = processes_here(None)
current_group(adapters()).next_attempt()
print(before, processes_here(None))
dist.barrier()
dist.destroy_process_group()
"""

JAX = """
import unickpt
from unickpt.frameworks.leaves import adapters
from unickpt.frameworks.process_group import current_group
from unickpt.frameworks.host_memory import processes_here
before = processes_here(None)
current_group(adapters()).next_attempt()
print(before, processes_here(None))
"""


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_the_processes_of_a_job_find_each_other(framework: str, processes: Processes) -> None:
    started: Any = processes.torch(3, TORCH) if framework == "torch" else processes.jax(3, 1, JAX)
    for out in processes.finish(started):
        assert out.split() == ["3", "3"]
