"""Random histories of checkpoints that share chunks: each loads bit for bit, or says what it lacks.

They are saved, removed, moved, copied, replaced, kept by rules, gone back from and damaged.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.saving import same
from support.strategies import examples

import unickpt
from unickpt import (
    CheckpointCorrupt,
    Checkpointer,
    CheckpointExists,
    SaveConflict,
    SaveOptions,
    StorageError,
)
from unickpt.commit import version
from unickpt.storage import paths

CHUNK, ROWS = 4096, 64
ACTIONS = [
    "save", "save", "run", "run", "remove", "move", "copy", "overwrite", "damage", "drop"
]  # fmt: skip


class Folder:
    """Checkpoints `step_<n>` in a folder, each with what it must hold.

    Arguments:
        data: draws what happens.
    """

    root: str

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.rng = np.random.default_rng(data.draw(st.integers(0, 99)))
        self.state: dict[str, Any] = {
            "w": self.rng.random((ROWS, CHUNK // 32)),
            "h": self.rng.random(3000).astype(np.float32),
            "step": 1,
        }
        self.there: dict[int, Any] = {}
        self.next = 0

    def path(self, step: int) -> str:
        return f"{self.root}/step_{step}"

    def now(self) -> dict[str, Any]:
        return {k: np.copy(v) if k != "step" else v for k, v in self.state.items()}

    def train(self) -> None:
        for _ in range(self.data.draw(st.sampled_from([0, 1, 1, 2, 30]))):
            self.state["w"][self.rng.integers(ROWS)] += 1
        for _ in range(self.data.draw(st.integers(0, 2))):  # elements, for patches
            self.state["h"][self.rng.integers(3000, size=9)] *= -1

    def some(self) -> int:
        return self.data.draw(st.sampled_from(sorted(self.there)))

    def draw(self, count: int) -> int:
        """A number below another one, which may differ from run to run."""
        return self.data.draw(st.integers(0, 1 << 16)) * count // (1 << 16 | 1)

    # --- what happens -----------------------------------------------------------------------------

    def save(self) -> None:
        base = self.path(self.some()) if self.there else None
        reuse = self.data.draw(st.sampled_from(["digest", "compare", "patch"]))
        made = SaveOptions(chunk_bytes=CHUNK, fsync=False, base=base, reuse=reuse)
        unickpt.save(self.path(self.next), self.state, options=made)
        self.there[self.next] = self.now()

    def run(self) -> None:
        """A job that goes on from a step, if it can be read, and removes what no rule keeps."""
        kept = self.data.draw(st.integers(1, 3))
        reuse = self.data.draw(st.sampled_from([True, "patch"]))
        options = SaveOptions(chunk_bytes=CHUNK, fsync=False)
        sound = {step for step in self.there if self.is_readable(step)}
        with Checkpointer(self.root, keep_last=kept, reuse=reuse, options=options) as run:
            if self.there and self.data.draw(st.booleans()):
                with suppress(CheckpointCorrupt):
                    run.load(step=max(self.there))
            for _ in range(2):
                run.save(self.next, self.state, wait=True)
                self.there[self.next] = self.now()
                sound.add(self.next)
                self.next += 1
                self.train()
            run.wait()
            left = run.steps()
        assert set(left) >= set(sorted(self.there)[-kept:])
        self.there = {step: self.there[step] for step in left}
        for step in self.protected(sound & set(left)):
            assert self.is_readable(step), "retention removed what a step needs"

    def protected(self, steps: set[int]) -> set[int]:
        """Those of which retention knows what they need."""
        return steps

    def remove(self) -> None:
        step = self.some()
        paths.resolve(self.path(step)).remove(paths.context())
        del self.there[step]

    def overwrite(self) -> None:
        step, base = self.some(), self.some()
        reuse = self.data.draw(st.sampled_from(["digest", "patch"]))
        options = SaveOptions(chunk_bytes=CHUNK, fsync=False, base=self.path(base), reuse=reuse)
        try:
            unickpt.save(self.path(step), self.state, overwrite=True, options=options)
        except CheckpointExists as error:
            self.check_refusal("which did not write them", error, {step})
        else:
            self.there[step] = self.now()

    def drop(self) -> None:
        step = self.some()
        with Checkpointer(self.root) as run:
            try:
                run.drop_later_steps(step)
            except SaveConflict as error:
                self.check_refusal("remove these first", error, set(run.steps()))
            left = run.steps()
        assert step in left
        self.there = {each: self.there[each] for each in left}

    def copy(self) -> None:
        step = self.some()
        try:
            unickpt.copy(self.path(step), self.path(self.next))
        except (CheckpointCorrupt, StorageError):
            assert self.may_be_damaged(step)
        else:
            self.there[self.next] = self.there[step]

    def move(self) -> None:
        raise NotImplementedError

    def damage(self) -> None:
        raise NotImplementedError

    # --- what must hold ---------------------------------------------------------------------------

    def is_needed(self, step: int) -> bool:
        raise NotImplementedError

    def check_refusal(self, words: str, error: Exception, steps: set[int]) -> None:
        assert words in str(error)
        assert any(self.is_needed(step) for step in steps)

    def may_be_damaged(self, step: int) -> bool:
        raise NotImplementedError

    def is_readable(self, step: int) -> bool:
        try:
            return same(unickpt.load(self.path(step)), self.there[step])
        except CheckpointCorrupt:
            return False

    def check(self) -> None:
        for step, expected in self.there.items():
            report = unickpt.verify(self.path(step))
            try:
                found = unickpt.load(self.path(step))
            except CheckpointCorrupt as error:
                self.check_damage(step, error, report)
            else:
                assert same(found, expected)
                assert report.ok, report.damage

    def check_damage(self, step: int, error: Exception, report: unickpt.types.VerifyReport) -> None:
        assert self.may_be_damaged(step), error
        assert not report.ok
        words = ("'w'", "'h'", "which is missing", "was replaced")
        assert any(word in str(error) for word in words), error


class LinkedFolder(Folder):
    """In a file system with links, where only bytes that changed on the disk do harm."""

    def __init__(self, data: st.DataObject) -> None:
        super().__init__(data)
        self.root = tempfile.mkdtemp()
        self.damaged = set[int]()  # inodes

    def files(self, step: int) -> list[Path]:
        """The files with chunks of a step."""
        found = Path(self.path(step)).glob("processes/*/*/*/*")
        every = (f for f in found if f.parent.name in ("d", "reused") and f.stat().st_size > 1000)
        own = [f for f in every if f.name not in ("nodes", "manifest.ocdbt")]
        return sorted(own, key=lambda f: (f.stat().st_size, f.name))

    def move(self) -> None:
        step = self.some()
        os.rename(self.path(step), self.path(self.next))
        self.there[self.next] = self.there.pop(step)

    def damage(self) -> None:
        files = self.files(self.some())
        file = files[self.draw(len(files))]
        at = self.draw(file.stat().st_size)
        with file.open("r+b") as opened:
            opened.seek(at)
            byte = opened.read(1)
            opened.seek(at)
            opened.write(bytes([byte[0] ^ 1]))
        self.damaged.add(file.stat().st_ino)

    def is_needed(self, step: int) -> bool:
        return False

    def may_be_damaged(self, step: int) -> bool:
        return any(file.stat().st_ino in self.damaged for file in self.files(step))

    def close(self) -> None:
        shutil.rmtree(self.root)


class BorrowingFolder(Folder):
    """In storage without links, where a step needs its base."""

    def __init__(self, data: st.DataObject) -> None:
        super().__init__(data)
        self.root = f"memory://{secrets.token_hex(6)}"
        self.damaged, self.moved = set[str](), set[str]()  # attempts

    def bases(self, step: int) -> list[tuple[int, str]]:
        """The bases of a step that were removed or replaced count, too."""
        found = version.version_at(paths.resolve(self.path(step)))
        assert found is not None
        with suppress(CheckpointCorrupt):
            index = unickpt.open(self.path(step)).index
            return [(int(base.name.removeprefix("step_")), base.manifest) for base in index.bases]
        return [(-1, "")]

    def attempt(self, step: int) -> str:
        found = version.version_at(paths.resolve(self.path(step)))
        return "" if found is None else found.attempt

    def move(self) -> None:
        step = self.some()
        store = paths.resolve(self.path(step)).store(paths.context())
        there = paths.resolve(self.path(self.next)).store(paths.context())
        for key in store.list().result():
            there.write(key.decode(), store.read(key.decode()).result().value).result()
        self.moved.add(self.attempt(step))
        paths.resolve(self.path(step)).remove(paths.context())
        self.there[self.next] = self.there.pop(step)

    def damage(self) -> None:
        step = self.some()
        store = paths.resolve(self.path(step)).store(paths.context())
        every = {
            key.decode(): store.read(key.decode()).result().value for key in store.list().result()
        }
        of = sorted((len(v), key) for key, v in every.items() if "/d/" in key and len(v) > 1000)
        if not of:
            return
        key = of[self.draw(len(of))][1]
        value = bytearray(every[key])
        value[self.draw(len(value))] ^= 1
        store.write(key, bytes(value)).result()
        self.damaged.add(self.attempt(step))

    def is_needed(self, step: int) -> bool:
        if self.attempt(step) in self.moved:
            return True  # it keeps the marks of those that borrow, and may be moved back
        return any(
            base == step for each in self.there for base, _ in self.bases(each) if each != step
        )

    def protected(self, steps: set[int]) -> set[int]:
        return {step for step in steps if self.attempt(step) not in self.moved}

    def may_be_damaged(self, step: int) -> bool:
        if self.attempt(step) in self.damaged:
            return True
        bases = self.bases(step)
        return any(base < 0 or self.attempt(base) in self.damaged for base, _ in bases)

    def close(self) -> None:
        paths.resolve(self.root).remove(paths.context())


@pytest.mark.integration
@pytest.mark.parametrize("kind", [LinkedFolder, BorrowingFolder])
@examples(25)
@given(data=st.data())
def test_any_history_leaves_checkpoints_that_load_or_say_why_not(
    kind: Callable[[st.DataObject], Any], data: st.DataObject
) -> None:
    folder = kind(data)
    try:
        for _ in range(data.draw(st.integers(3, 9))):
            folder.train()
            action = data.draw(st.sampled_from(ACTIONS)) if folder.there else "save"
            getattr(folder, action)()
            folder.next += 1
            folder.check()
    finally:
        folder.close()
