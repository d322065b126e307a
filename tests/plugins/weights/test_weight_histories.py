"""Random histories of publishers and followers: what is live is always a version, as a whole, and
its number is right."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import examples

from unickpt import SaveConflict, SaveOptions, UnickptError
from unickpt.extend import Box, local_folders
from unickpt.plugins.weights import Follower, Publisher, page_swap
from unickpt.types import LocalFragments

pytestmark = pytest.mark.plugins
OPTIONS = SaveOptions(chunk_bytes=1 << 12, fsync=False, kept_cost=1)
SHAPE = (64, 64)
ACTIONS = [
    *("publish", "publish", "publish", "update", "update", "rollback", "remove"),
    *("restart follower", "restart publisher", "second publisher", "damage", "check"),
]


class History:
    """A publisher, two followers, and a dict of what each version holds."""

    def __init__(self, root: Path, data: st.DataObject) -> None:
        self.root, self.data = root, data
        self.rng = np.random.default_rng(data.draw(st.integers(0, 99)))
        self.state = {"w": self.rng.integers(0, 1 << 16, SHAPE).astype(np.uint16)}
        self.state["small"] = np.arange(5)
        self.keep_last = data.draw(st.sampled_from([None, 1, 3]))
        self.publisher = self.new_publisher()
        self.versions: dict[int, dict[str, Any]] = {}
        self.damaged = set[int]()
        self.next, self.has_lease = 0, False
        self.followers = [self.new_follower() for _ in range(2)]

    def new_publisher(self) -> Publisher:
        return Publisher(self.root, keep_last=self.keep_last, options=OPTIONS)

    def new_follower(self) -> tuple[Follower, dict[str, Any]]:
        live: dict[str, Any] = {name: np.zeros_like(array) for name, array in self.state.items()}
        kind = self.data.draw(st.sampled_from(["in place", "swap", "pages", "parts"]))
        tree: dict[str, Any] = live
        if kind == "swap":
            tree = live = {name: torch.from_numpy(array) for name, array in live.items()}
        elif kind == "pages":
            live["w"] = np.zeros((3 * 4096,), np.uint16)[100:][: 64 * 64].reshape(SHAPE)
        elif kind == "parts":  # as of one rank, twice
            halves = [(Box((0, a), (64, b)), live["w"][:, a:b]) for a, b in ((0, 40), (40, 64))]
            tree = {**live, "w": LocalFragments(SHAPE, halves)}
        swap: Any = {"swap": True, "pages": "pages"}.get(kind, False)
        keeps = self.data.draw(st.booleans())
        follower = Follower(self.root, tree, lease_s=1000, swap=swap, keep_copies=keeps)
        return follower, live

    def draw_follower(self) -> int:
        return self.data.draw(st.integers(0, 1))

    def there(self) -> list[int]:
        return self.publisher.versions()

    # --- actions ----------------------------------------------------------------------------------

    def publish(self) -> None:
        count = self.data.draw(st.sampled_from([0, 3, 40, 4096]))
        self.state["w"].reshape(-1)[self.rng.integers(0, 4096, count)] += 1
        self.state["small"][self.rng.integers(5)] += 1
        version = self.next + self.data.draw(st.integers(0, 2))
        self.publisher.publish(version, self.state).result()
        self.publisher.wait()
        self.versions[version] = {name: a.copy() for name, a in self.state.items()}
        self.next, self.has_lease = version + 1, True

    def update(self) -> None:
        number = self.draw_follower()
        follower, _ = self.followers[number]
        before, there = follower.version, self.there()
        try:
            changed = follower.update()
        except UnickptError:
            assert self.damaged, "only damage stops an update"
            assert follower.version == before
            return
        assert changed == (follower.version != before)
        if changed:
            assert follower.version == there[-1]

    def rollback(self) -> None:
        follower, _ = self.followers[self.draw_follower()]
        before = follower.version
        version = self.data.draw(st.sampled_from([*self.versions, 999]))
        try:
            follower.rollback(version)
            assert follower.version == version
        except UnickptError:
            assert self.damaged or version not in self.there()
            assert follower.version == before

    def remove(self) -> None:
        """Somebody removes a version, whoever reads it; not the last one, which is the base."""
        there = self.there()
        if len(there) > 1:
            version = self.data.draw(st.sampled_from(there[:-1]))
            local_folders.remove(str(self.root / f"step_{version}"))

    def restart_follower(self) -> None:
        number = self.draw_follower()
        if self.data.draw(st.booleans()):  # else it was killed, and its note stays
            self.followers[number][0].close()
        self.followers[number] = self.new_follower()

    def restart_publisher(self) -> None:
        self.publisher.close()
        self.publisher = self.new_publisher()
        self.has_lease = False

    def second_publisher(self) -> None:
        if not self.has_lease:  # it is the only one then
            return
        with suppress(SaveConflict), self.new_publisher() as second:
            second.publish(self.next, {"w": self.state["w"] + 1, "small": self.state["small"]})
            second.wait()
            raise AssertionError("two publishers")

    def damage(self) -> None:
        """A byte of the newest version's own files flips."""
        there = self.there()
        if not there:
            return
        folder = self.root / f"step_{there[-1]}"
        files = [f for f in sorted(folder.rglob("*")) if f.is_file() and f.stat().st_nlink == 1]
        file = self.data.draw(st.sampled_from(files))
        content = bytearray(file.read_bytes())
        if content:
            content[self.data.draw(st.integers(0, 1 << 20)) % len(content)] ^= 8
            file.write_bytes(content)
            self.damaged.add(there[-1])

    def check(self) -> None:
        follower, _ = self.followers[self.draw_follower()]
        try:
            assert follower.check().ok
        except ValueError:
            assert follower.version is None or self.damaged
        except UnickptError:
            assert follower.version not in self.there() or self.damaged

    def prove(self) -> None:
        """What is live is the version that the follower reports."""
        for follower, live in self.followers:
            if follower.version is None:
                assert not any(np.asarray(array).any() for array in live.values())
                continue
            expected = self.versions[follower.version]
            arrays = {name: np.asarray(array) for name, array in live.items()}
            assert all(arrays[name].tobytes() == expected[name].tobytes() for name in expected)


def live_through(data: st.DataObject, steps: int) -> None:
    folder = Path(tempfile.mkdtemp(prefix="unickpt-weights-"))
    patch = pytest.MonkeyPatch()
    patch.setattr(page_swap, "_LEAST_BYTES", 4096)
    history = History(folder / "run", data)
    try:
        history.publish()
        for _ in range(steps):
            action = data.draw(st.sampled_from(ACTIONS))
            if history.damaged and action in ("publish", "second publisher", "restart publisher"):
                action = "update"  # a damaged base is another test's
            getattr(history, action.replace(" ", "_"))()
            history.prove()
    finally:
        with suppress(UnickptError):
            history.publisher.close()
        for follower, _ in history.followers:
            follower.close()
        patch.undo()
        shutil.rmtree(folder)


@pytest.mark.integration
@given(data=st.data())
@examples(60)
def test_histories(data: st.DataObject) -> None:
    live_through(data, 12)


@pytest.mark.slow
@given(data=st.data())
@examples(1000)
def test_many_histories(data: st.DataObject) -> None:
    live_through(data, 40)
