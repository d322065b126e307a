"""The parts of a tier of nodes: keepers of copies, servers of files, agreements of processes."""

from __future__ import annotations

import http.client
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unickpt.errors import StorageError
from unickpt.extend import resolve_path
from unickpt.plugins.nodes import membership
from unickpt.plugins.nodes.file_server import FileServer
from unickpt.plugins.nodes.membership import NodeProcess
from unickpt.plugins.nodes.node_folder import NodeFolder
from unickpt.plugins.nodes.node_parity import sum_groups
from unickpt.plugins.nodes.peer_copies import keepers
from unickpt.plugins.parity import codes
from unickpt.plugins.parity.saving import Parity


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 2)), min_size=1, max_size=20))
def test_a_copy_is_always_on_a_node_of_another_unit(places: Sequence[tuple[int, int]]) -> None:
    units = dict(reversed(places))
    members = [NodeProcess(f"n{node}", "", f"u{units[node]}") for node, _ in places]
    if len(set(units.values())) < 2:
        with pytest.raises(ValueError, match="at least two units"):
            keepers(members)
        return
    for member, keeper in zip(members, keepers(members), strict=True):
        assert members[keeper].node != member.node
        assert members[keeper].unit != member.unit


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FileServer]:
    (tmp_path / "node" / "step_1").mkdir(parents=True)
    (tmp_path / "node" / "step_1" / "d").write_bytes(bytes(range(100)))
    (tmp_path / "node" / "step_1" / "empty").write_bytes(b"")
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "node" / "link").symlink_to(tmp_path / "secret")
    running = FileServer(f"{tmp_path}/node/")
    yield running
    running.close()


def ask(url: str, **headers: str) -> tuple[int, bytes]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=20)
    try:
        connection.request("GET", parts.path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("wanted", "status", "first", "length"),
    [("0-99", 206, 0, 100), ("7-9", 206, 7, 3), ("90-", 206, 90, 10), ("90-500", 206, 90, 10)],
)
def test_ranges_are_served(
    wanted: str, status: int, first: int, length: int, server: FileServer
) -> None:
    data = bytes(range(100))[first : first + length]
    assert ask(f"{server.url}step_1/d", Range=f"bytes={wanted}") == (status, data)


def test_whole_files_and_names_are_served(server: FileServer) -> None:
    assert ask(f"{server.url}step_1/d") == (200, bytes(range(100)))
    assert ask(f"{server.url}step_1/empty") == (200, b"")
    assert ask(f"{server.url}step_1/") == (200, b'{"d":100,"empty":0}')
    assert ask(f"{server.url}step_1/d", Range="bytes=100-200")[0] == 416


@pytest.mark.parametrize(
    "path", ["link", "../secret", "step_1/../../secret", "step_1", "none", "none/", ""]
)
def test_nothing_else_is_served(path: str, server: FileServer) -> None:
    assert ask(server.url + path)[0] == 404


def test_only_who_knows_the_url_gets_files(server: FileServer) -> None:
    parts = urlsplit(server.url)
    other = f"http://{parts.netloc}/{parts.path.strip('/')[::-1]}/step_1/d"
    assert ask(other)[0] == 404


def test_a_node_is_named_once(tmp_path: Path) -> None:
    names: list[str] = []
    folder = f"{tmp_path}/node/"

    def name() -> None:
        names.append(NodeFolder(folder).identity())

    threads = [threading.Thread(target=name) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(names)) == 1
    assert len(names) == 16
    assert [path.name for path in (tmp_path / "node").iterdir()] == [".node"]


def gathered(location: Any, name: str, members: Sequence[NodeProcess]) -> list[list[NodeProcess]]:
    answers: list[list[NodeProcess]] = [[]] * len(members)

    def join(index: int) -> None:
        whole = location, name, index, len(members), members[index]
        answers[index] = membership.gather(*whole, 20.0)

    threads = [threading.Thread(target=join, args=(index,)) for index in range(len(members))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def test_all_processes_hear_the_same(tmp_path: Path) -> None:
    location = resolve_path(tmp_path / "control")
    parts = {"step_1": {"a-0": [0, 3]}}
    members = [NodeProcess(f"n{index // 2}", f"u{index}", "", parts) for index in range(6)]
    answers = gathered(location, "first", members)
    assert all(answer == answers[0] for answer in answers)
    assert [bool(member.parts) for member in answers[0]] == [True, False] * 3
    gathered(location, "second", members[:2])
    assert [path.name for path in (tmp_path / "control" / "members").iterdir()] == ["second"]


def test_what_is_no_answer_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "control" / "members" / "x"
    folder.mkdir(parents=True)
    (folder / "all").write_bytes(b"[{}]")
    with pytest.raises(StorageError, match="said something else"):
        membership.gather(resolve_path(tmp_path / "control"), "x", 1, 2, NodeProcess("a", "b"), 5.0)


# --- parity -----------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.integers(1, 17), st.integers(1, 2))
def test_a_unit_has_at_most_one_stream_or_sum_of_a_group(
    units: Sequence[int], multiple: int, sums: int
) -> None:
    members = [NodeProcess(f"node {n}", "", f"unit {n}") for n in units]
    groups = sum_groups(dict(enumerate(members)), members, (multiple, sums))
    if len({*units}) <= sums:
        assert groups == []
        return
    assert sorted(p for group in groups for p in group.processes) == [*range(len(units))]
    for group in groups:
        assert len(group.keepers) == sums
        assert 1 <= len(group.processes) <= multiple
        places = [units[p] for p in (*group.processes, *group.keepers)]
        assert len({*places}) == len(places)


def test_eight_nodes_of_nine_cost_an_eighth() -> None:
    members = [NodeProcess(f"n{n}", "", f"n{n}") for n in range(72)]
    groups = sum_groups(dict(enumerate(members)), members, (8, 1))
    assert len(groups) == 9
    assert len({keeper for group in groups for keeper in group.keepers}) == 9


@pytest.mark.integration  # 1,000 losses
def test_a_thousand_losses_of_units_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams of uneven bytes on up to 64 nodes in racks; what fails together is lost together."""
    monkeypatch.setattr(codes, "SEGMENT_BYTES", 64)
    rng = np.random.default_rng(51)
    for case in range(1000):
        counts = (int(rng.integers(1, 17)), 1 + case % 2)
        code: Any = Parity(counts)
        units = rng.integers(0, int(rng.integers(counts[1] + 1, 33)), int(rng.integers(3, 65)))
        members = [NodeProcess(f"n{n}", "", f"rack {unit}") for n, unit in enumerate(units)]
        groups = sum_groups(dict(enumerate(members)), members, counts)
        if not groups:
            continue
        streams = [rng.bytes(int(rng.integers(0, 50))) for _ in members]
        racks = rng.permutation(np.unique(units))
        gone = {*racks[: counts[1] + (case % 5 == 0)]}  # sometimes more than parity covers
        uncovered = 0
        for group in groups:
            pieces = [streams[p] for p in group.processes]
            if not any(pieces):
                continue
            sums = dict(enumerate(code.encode(pieces)))
            left = {n: sums[n] for n, p in enumerate(group.keepers) if units[p] not in gone}
            have = [None if units[p] in gone else streams[p] for p in group.processes]
            if have.count(None) > len(left):
                uncovered += 1
            elif None in have:
                for place, data in code.decode(have, left).items():
                    expected = pieces[place]
                    assert data[: len(expected)] == expected, (case, group)
                    assert not any(data[len(expected) :])
        assert not uncovered or len(gone) > counts[1], case


def test_the_manifest_has_only_fields_of_kubernetes() -> None:
    """As in the reference of core/v1: Volume, HostPathVolumeSource, EnvVar."""
    text = (Path(__file__).parents[3] / "docs/howto/nodes.md").read_text()
    yaml: Any = pytest.importorskip("yaml")  # which mkdocs needs
    (block,) = re.findall(r"```text\n(volumes:.*?)```", text, re.DOTALL)
    pod = yaml.safe_load(block)
    assert pod.keys() == {"volumes", "env"}
    for volume in pod["volumes"]:
        assert volume.keys() == {"name", "hostPath"}
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", volume["name"])
        assert volume["hostPath"].keys() == {"path", "type"}
        assert volume["hostPath"]["path"].startswith("/")
        assert volume["hostPath"]["type"] in {"", "DirectoryOrCreate", "Directory"}
    for variable in pod["env"]:
        assert variable.keys() == {"name", "valueFrom"}
        assert variable["valueFrom"].keys() == {"fieldRef"}
        field = variable["valueFrom"]["fieldRef"]
        assert field["fieldPath"] in {"status.podIP", "status.hostIP"}
    assert {variable["name"] for variable in pod["env"]} == {"UNICKPT_NODE_ADDRESS"}
