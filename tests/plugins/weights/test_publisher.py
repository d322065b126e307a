"""A publisher adds versions to a run, and keeps those that followers read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unickpt
from unickpt import Function, Rules, SaveConflict, SaveOptions
from unickpt.extend import resolve_path
from unickpt.plugins.weights import Follower, Publisher
from unickpt.plugins.weights.leases import Leases

pytestmark = pytest.mark.plugins
OPTIONS = SaveOptions(fsync=False)


def state(version: int) -> dict[str, Any]:
    return {"w": np.full(1000, version)}


def test_versions_are_steps_of_a_run_that_every_tool_reads(tmp_path: Path) -> None:
    with Publisher(tmp_path, options=OPTIONS) as publisher:
        for version in (0, 1, 5):
            pending = publisher.publish(version, state(version), metadata={"reward": version})
            assert pending.result().url.endswith(f"step_{version}/")
        assert publisher.versions() == [0, 1, 5]
    assert unickpt.load(tmp_path / "step_5")["w"][0] == 5
    assert unickpt.open(tmp_path / "step_1").metadata["reward"] == 1
    assert unickpt.verify(tmp_path / "step_5").ok


@pytest.mark.parametrize("version", [-1, True, 1.5, "1", None])
def test_a_version_is_a_whole_number(version: Any, tmp_path: Path) -> None:
    with Publisher(tmp_path, options=OPTIONS) as publisher, pytest.raises(ValueError, match="must"):
        publisher.publish(version, state(0))


def test_a_version_must_be_above_the_last_one(tmp_path: Path) -> None:
    with Publisher(tmp_path, options=OPTIONS) as publisher:
        publisher.publish(3, state(3)).result()
        for version in (0, 3):
            with pytest.raises(ValueError, match=f"version {version} .*not above the last one, 3"):
                publisher.publish(version, state(9))
    with Publisher(tmp_path, options=OPTIONS) as publisher:
        with pytest.raises(ValueError, match="last one, 3"):
            publisher.publish(2, state(9))
        publisher.publish(4, state(4)).result()
    assert unickpt.load(tmp_path / "step_3")["w"][0] == 3


def test_a_version_that_failed_can_be_published_again(tmp_path: Path) -> None:
    with Publisher(tmp_path, options=OPTIONS) as publisher:
        publisher.publish(0, state(0)).result()
        (tmp_path / "step_1").write_text("in the way")
        with pytest.raises(unickpt.UnickptError):
            publisher.publish(1, state(1)).result()
        (tmp_path / "step_1").unlink()
        publisher.publish(1, state(1)).result()
        assert publisher.versions() == [0, 1]


def test_a_second_publisher_by_mistake_is_refused(tmp_path: Path) -> None:
    live = {"w": np.zeros(1000, int)}
    with Publisher(tmp_path, options=OPTIONS) as publisher, Follower(tmp_path, live) as follower:
        publisher.publish(0, state(0)).result()
        with Publisher(tmp_path, options=OPTIONS) as second:
            with pytest.raises(SaveConflict, match="saves here and is not closed"):
                second.publish(1, state(99)).result()
            publisher.publish(1, state(1)).result()
        assert follower.update()
        assert live["w"][0] == 1


def test_rules_that_have_no_text_are_refused(tmp_path: Path) -> None:
    function = Function(lambda box, x: x, lambda box, x: x)
    rules = Rules.parse("w [n] <-> v [n] via f", functions={"f": function})
    with pytest.raises(ValueError, match="give them to each Follower"):
        Publisher(tmp_path, rules)


def test_leased_versions_are_kept_until_the_follower_moves_on(tmp_path: Path) -> None:
    live = {"w": np.zeros(1000, int)}
    with Publisher(tmp_path, keep_last=2, options=OPTIONS) as publisher:
        publisher.publish(0, state(0)).result()
        with Follower(tmp_path, live) as follower:
            follower.update()
            for version in range(1, 5):
                publisher.publish(version, state(version)).result()
                publisher.wait()
            assert publisher.versions() == [0, 3, 4]
            assert follower.check().ok
            follower.update()
            publisher.publish(5, state(5)).result()
            publisher.wait()
            assert publisher.versions() == [4, 5]
        assert not list((tmp_path / ".followers").iterdir())


def test_expired_leases_are_ignored_and_removed(tmp_path: Path) -> None:
    folder, now = tmp_path / ".followers", [0.0]
    folder.mkdir()
    note = {"versions": [1, 7], "expires_s": 30, "renewals": 1}
    (folder / "dead.json").write_text(json.dumps(note))
    (folder / "broken.json").write_text("{")
    (folder / "wrong.json").write_text(json.dumps({**note, "versions": ["x"]}))
    leases = Leases(resolve_path(tmp_path), lambda: now[0])
    assert leases.leased_among([0, 1, 2]) == [1]
    assert [file.name for file in folder.iterdir()] == ["dead.json"]
    now[0] = 29
    assert leases.leased_among([0, 1, 2]) == [1]
    (folder / "dead.json").write_text(json.dumps({**note, "renewals": 2}))
    now[0] = 45
    assert leases.leased_among([0, 1, 2]) == [1]
    now[0] = 76
    assert leases.leased_among([0, 1, 2]) == []
    assert not list(folder.iterdir())


def test_leases_are_renewed(tmp_path: Path) -> None:
    with Publisher(tmp_path, options=OPTIONS) as publisher:
        publisher.publish(0, state(0)).result()
        with Follower(tmp_path, {"w": np.zeros(1000, int)}, lease_s=0.02, rank=3) as follower:
            follower.update()
            # Not all files: a renewal first writes one of another name.
            (note,) = (tmp_path / ".followers").glob("*.json")
            seen = set[int]()
            while len(seen) < 3:
                text = note.read_text() or '{"renewals": 0}'
                seen.add(json.loads(text)["renewals"])
            assert json.loads(note.read_text())["rank"] == 3


def test_a_folder_in_which_no_lease_can_be_written_is_followed_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    live = {"w": np.zeros(1000, int)}
    with Publisher(tmp_path, keep_last=1, options=OPTIONS) as publisher:
        publisher.publish(0, state(0)).result()
        (tmp_path / ".followers").write_text("in the way")
        with Follower(tmp_path, live) as follower:
            assert follower.update()
            publisher.publish(1, state(1)).result()
            publisher.wait()
            assert follower.update()
            assert live["w"][0] == 1
    assert "a lease cannot be written now" in caplog.text


def test_versions_on_other_storage() -> None:
    live = {"w": np.zeros(1000, int)}
    with (
        Publisher("memory://weights/other", keep_last=1) as publisher,
        Follower("memory://weights/other", live) as follower,
    ):
        for version in range(3):
            publisher.publish(version, state(version)).result()
            assert follower.update()
            assert live["w"][0] == version
        assert follower.check().ok
