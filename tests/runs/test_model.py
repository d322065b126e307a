"""Random runs beside a model of them: every step that must exist loads bit for bit.

Jobs with all kinds of options save, load, go back, branch, remove, replace, copy, fail and are
killed; after each a model says which steps must be there, and what they hold.
"""

from __future__ import annotations

import os
import pickle
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.forked import PRELOADED
from support.forks import Forks
from support.run_model import (
    ARRAYS,
    CHILD,
    FRAMEWORKS,
    ChildJob,
    JobOptions,
    Roles,
    RolesPending,
    Saved,
    State,
    check_tidy,
    contents,
    first_values,
    flat,
    refuse,
    to_numpy,
)

import unickpt
from unickpt import Checkpointer, CheckpointExists, SaveConflict, StorageError, UnsupportedLeaf
from unickpt.commit.coordinator import Coordinator
from unickpt.errors import LaterStepsExist
from unickpt.runs import save_leftovers
from unickpt.saving.writer import ChunkWriter
from unickpt.storage import paths
from unickpt.types import PendingSave

pytestmark = pytest.mark.plugins  # some of its runs quantise

_FEW, _MANY = 12, 20_000
"""How many runs `make test` and `make soak` try."""
JOBS = st.builds(
    JobOptions,
    reuse=st.sampled_from([True, True, "patch", "patch", "compare", False]),
    compression=st.sampled_from([None, None, "auto", "zstd", "blosc"]),
    quantize=st.sampled_from([None, None, "uint8", "int4", "bfloat16", "restores"]),
    experts=st.sampled_from([0, 0, 0, 1, 2]),
    keep_last=st.sampled_from([None, 1, 1, 2, 3]),
    keep_every=st.sampled_from([None, None, 3]),
    keep_best=st.sampled_from([None, None, 1]),
    staging=st.sampled_from(["auto", "copy", "reference", "lazy", "device"]),
    chunk_bytes=st.sampled_from([4096, 4096, 32768, 8 << 20]),
    is_local=st.sampled_from([True, True, False]),
)
WORDS = st.sampled_from(["none", "all tracked", "dict", "rows", "mixed"])
FAILURES = {"chunks": (ChunkWriter, "write_all"), "root": (Coordinator, "_write_root")}
"""Where a save fails in the background."""
# Where a child dies: a function of unickpt that it calls while it saves, copies or removes.
DEATHS = [
    "saving.task:describe",
    "saving.writer.ChunkWriter:write_all",
    "commit.attempt.Attempt:publish",
    "commit.coordinator.Coordinator:_write_root",
    "commit.root.Root:replace",
    "commit.borrowers:mark",
    "format.borrowed:retire",
    "runs.attempt_folders:remove_checkpoint",
    "runs.tier_copies:copy_version",
    "runs.lineage_notes:record_copied",
    "",
]
SEEDS = st.integers(0, 999)


class Runs(RuleBasedStateMachine):
    """One run: a folder, the job that saves there now, and what the model knows of both."""

    forks: Forks
    run: Checkpointer | Roles

    # --- the folder ------------------------------------------------------------------------------

    @initialize(
        storage=st.sampled_from(["links", "links", "no links", "roles", "memory"]),
        has_local=st.booleans(),
        frameworks=st.lists(
            st.sampled_from(FRAMEWORKS), min_size=len(ARRAYS), max_size=len(ARRAYS)
        ),
        seed=SEEDS,
        options=JOBS,
    )
    def begin(
        self, storage: str, has_local: bool, frameworks: list[str], seed: int, options: JobOptions
    ) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(save_leftovers, "RECENT_S", -60)
        self.patch.delenv("TMPDIR", raising=False)
        self.storage = storage
        self.runs = "run"
        self.root = str(self.folder / "run" / "root")
        if storage == "memory":
            self.root = f"memory://model/{secrets.token_hex(6)}"
        self.local = self.twin = None
        if storage == "roles":
            self.twin = str(self.folder / "run" / "twin")
        elif has_local:
            self.local = str(self.folder / "run" / "local")
        self.has_uncopied = False
        if storage == "no links":
            self.patch.setattr(os, "link", refuse)
        beside = self.folder / "beside"
        unickpt.save(beside / "step_1", {"w": np.arange(9)})
        (beside / "notes.txt").write_text("not of the run")
        self.beside = contents(beside)
        self.rng = np.random.default_rng(seed)
        self.frameworks = dict(zip(ARRAYS, frameworks, strict=True))
        self.state = State(self.frameworks, first_values(self.rng))
        self.saved: dict[int, Saved] = {}
        """All steps that may exist."""
        self.must: set[int] = set()
        """Those that must."""
        self.removed: dict[int, Saved] = {}
        self.in_flight: list[tuple[PendingSave | RolesPending, Saved]] = []
        self._open(options)

    def teardown(self) -> None:
        if not hasattr(self, "folder"):
            return
        try:
            if hasattr(self, "run") and sys.exc_info()[0] is None:
                self._close()
                self._open(JobOptions(reuse=False))
                self._check_all()
                self._save(self._next(), "none", 0)  # which also removes what is stale
                self._close()
                self._check_folders()
        finally:
            self.patch.undo()
            shutil.rmtree(self.folder)
            if self.storage == "memory":
                paths.resolve(self.root).remove(paths.context())

    @property
    def has_links(self) -> bool:
        """Whether every step is complete in itself."""
        return self.storage in ("links", "roles")

    # --- jobs ------------------------------------------------------------------------------------

    def _open(self, options: JobOptions, *, settles: bool = True) -> None:
        if self.has_uncopied:
            options = replace(options, is_local=True)
        if self.twin is not None:
            options = replace(options, after=None)
        self.options = options
        self.run = options.open(self.root, self.local, self.twin)
        self.recent: Saved | None = None
        """The step that this job saved or loaded last."""
        self.branch = options.after
        self.has_saved = False
        self.is_replaced = False
        """Whether another job may have replaced the step before, about which words would be."""
        self.dirty: dict[str, Any] | None = None
        """The rows that changed since the last save or load of this job; None if it had none."""
        if settles:
            self._settle()

    def _close(self) -> None:
        self._drain()
        self.run.close()

    def _visible(self) -> set[int]:
        """The steps that this job sees."""
        after = self.options.after
        if after is None:
            return set(self.saved)
        return {s for s, saved in self.saved.items() if s <= after or saved.after == after}

    def _drain(self) -> None:
        """Waits, and finds out which steps there are."""
        in_flight, self.in_flight = self.in_flight, []
        for pending, _ in in_flight:
            pending.result()
        self.run.wait()
        self.has_uncopied = self.has_uncopied and not in_flight
        self._settle()

    def _settle(self) -> None:
        """Compares the steps that exist with those that must, and forgets those that went."""
        steps = set(self.run.steps())
        if self.local is not None and not (self.has_links and self.saved):
            # A step that the local tier has still counts if the root has none.
            self.saved |= {
                s: self.removed[s] for s in steps if s not in self.saved and s in self.removed
            }
        visible = self._visible()
        must = self.must & visible
        assert must <= steps, f"lost: {sorted(must - steps)}; there are {sorted(steps)}"
        assert steps <= visible, f"came from nowhere: {sorted(steps - visible)}"
        if self.has_links and self.has_saved:
            assert steps == must, f"not removed: {sorted(steps - must)}"
        for step in visible - steps:
            self._forget(step)
        if self.has_links:  # else a step may be there only because another needs it
            self.must |= steps

    def _forget(self, step: int) -> None:
        self.removed[step] = self.saved.pop(step)
        self.must.discard(step)

    def _commit(self, saved: Saved) -> None:
        """A save was, or will be, committed: what the rules then keep must exist."""
        if not self.has_saved and self.options.after is not None:
            visible = self._visible()
            self.saved = {step: each for step, each in self.saved.items() if step in visible}
            self.must &= visible
        self.has_saved = True
        self.saved[saved.step] = saved
        self.must.add(saved.step)
        there = self.must if self.has_links else set(self.saved)
        self.must &= self.options.kept({step: self.saved[step].loss for step in there})

    # --- training --------------------------------------------------------------------------------

    @rule(seed=SEEDS, most=st.sampled_from([1, 3, len(ARRAYS)]), share=st.sampled_from([1, 9, 99]))
    def train(self, seed: int, most: int, share: int) -> None:
        rng = np.random.default_rng(seed)
        self._before_change()
        for name in rng.permutation(list(ARRAYS))[:most]:
            shape = ARRAYS[name][0]
            rows = rng.random(shape[0] if shape else 1) < share / 100
            self.state.change(name, rows, rng)
            if self.dirty is not None:
                self.dirty[name] |= rows

    def _before_change(self) -> None:
        for pending, _ in self.in_flight:
            pending.wait_staged()

    def _clean(self) -> dict[str, Any]:
        return {
            name: np.zeros(shape[0] if shape else 1, bool) for name, (shape, _) in ARRAYS.items()
        }

    def _changed(self, words: str, rng: np.random.Generator) -> Any:
        """Something true of what changed since the last save or load."""
        if words == "none" or not self.options.reuse or self.is_replaced:
            return None
        if words == "all tracked":
            return "tracked"
        # Before the first save there is nothing that a word could be about.
        dirty = self._clean() if self.dirty is None else self.dirty
        found: dict[str, Any] = {}
        for name in rng.permutation(list(ARRAYS))[: rng.integers(1, len(ARRAYS) + 1)]:
            rows = dirty[name]
            if name == "q" and self._was_quantised():
                continue  # exact values are nowhere
            if not rows.any() and rng.random() < 0.8:
                found[name] = False
            elif words != "dict" and ARRAYS[name][0] and name != "empty":
                found[name] = rows.copy()
            else:
                found[name] = True
        if words == "mixed":
            found["**"] = "tracked"
        return found

    def _was_quantised(self) -> bool:
        before = None if self.recent is None else self.recent.options.quantize
        return before is not None and self.options.quantize is None

    # --- saves -----------------------------------------------------------------------------------

    def _next(self) -> int:
        visible = self._visible()
        return max(visible, default=0) + 1

    def _saved(self, step: int, loss: float) -> Saved:
        return Saved(step, self.state.values(), self.options, self.recent, self.branch, loss)

    def _save(self, step: int, words: str, seed: int, **arguments: Any) -> None:
        rng = np.random.default_rng(seed)
        changed = self._changed(words, rng)
        saved = self._saved(step, float(rng.integers(0, 9)))
        pending = self.run.save(
            step, self.state.tree(step), metrics={"loss": saved.loss}, changed=changed, **arguments
        )
        self.dirty = self._clean()
        self.in_flight.append((pending, saved))
        self.is_replaced = False
        self._commit(saved)
        self.recent = saved

    @rule(words=WORDS, count=st.integers(1, 4), wait=st.booleans(), seed=SEEDS)
    def save(self, words: str, count: int, wait: bool, seed: int) -> None:
        """Saves steps, with a little training between them."""
        for number in range(count):
            self._save(self._next(), words, seed + number)
            if number + 1 < count:
                self.train(seed + number, 2, 1)
        if wait:
            self._drain()

    @rule()
    def prepare(self) -> None:
        """It changes nothing."""
        self.run.prepare(self.state.tree(0))

    @rule(words=WORDS, wait=st.booleans(), seed=SEEDS)
    def save_many(self, words: str, wait: bool, seed: int) -> None:
        self.save(words, 6, wait, seed)

    @rule(words=WORDS, seed=SEEDS)
    def overwrite(self, words: str, seed: int) -> None:
        if visible := self._visible():
            self._drain()
            step = max(self._visible() or visible)
            try:
                self._save(step, words, seed, overwrite=True)
                self._drain()
            except CheckpointExists:  # others need the version that is there
                if self.has_links:
                    raise

    @rule(words=WORDS, how=st.sampled_from(["leaf", "exists", "later", "pattern", *FAILURES]))
    def fail(self, words: str, how: str) -> None:
        """A save that raises, or fails in the background, changes nothing."""
        if how in FAILURES:
            self._fail_late(words, *FAILURES[how])
            return
        visible = self._visible()
        tree, changed = self.state.tree(self._next()), self._changed(words, self.rng)

        def save(*arguments: Any, **keywords: Any) -> Any:
            try:
                return self.run.save(*arguments, **keywords, metrics={"loss": 0.0})
            finally:
                self._forget_abandoned()

        if how == "leaf":
            with pytest.raises(UnsupportedLeaf):
                save(self._next(), tree | {"bad": object()}, changed=changed)
        elif how == "exists" and visible:
            with pytest.raises(CheckpointExists):
                save(max(visible), tree, changed=changed).result()
        elif how == "later" and visible:
            with pytest.raises(LaterStepsExist):
                save(max(visible) - 1, tree, changed=changed).result()
        elif how == "pattern" and self.options.reuse:
            with pytest.raises(ValueError, match="no array"):
                save(self._next(), tree, changed={"no such array": False})

    def _fail_late(self, words: str, kind: type, method: str) -> None:
        self._drain()
        changed = self._changed(words, self.rng)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kind, method, _full)
            pending = self.run.save(
                self._next(), self.state.tree(0), metrics={"loss": 0.0}, changed=changed
            )
            with pytest.raises(StorageError, match="no space"):
                pending.result()
        self.dirty = self._clean()
        self._forget_abandoned()
        self.run.wait()

    def _forget_abandoned(self) -> None:
        """Forgets the steps that `after` abandons: they are removed before the first save."""
        for step in self.saved.keys() - self._visible():
            self._forget(step)

    # --- loads -----------------------------------------------------------------------------------

    @rule(which=SEEDS, like=st.booleans(), goes_on=st.sampled_from(["newest", "back", "here"]))
    def load(self, which: int, like: bool, goes_on: str) -> None:
        """The program goes on from the newest step, or from an older one without later ones; or it
        only looks at a step."""
        self._drain()
        if visible := sorted(self._visible()):
            step = visible[-1] if goes_on == "newest" else visible[which % len(visible)]
            state, dirty = self.state, self.dirty
            self._load(step, like)
            if goes_on == "here":
                self.state, self.dirty = state, dirty
            if goes_on == "back":
                self._remove({s for s in visible if s > step}, self.run.drop_later_steps)

    def _load(self, step: int, like: bool) -> None:
        tree = self.run.load(self.state.like() if like else None, step=step)
        saved = self.saved[step]
        saved.resolve(self.run.path(step))
        saved.check(tree)
        arrays = flat(tree)
        values = {name: to_numpy(array) for name, array in arrays.items()}
        self.state = State(self.frameworks, values)
        if like:
            self.state.arrays = arrays
        self.dirty, self.recent = self._clean(), saved
        self.is_replaced = False
        if self.options.after is None:
            self.branch = saved.after

    def _remove(self, steps: set[int], work: Callable[[], object]) -> None:
        """Removes steps, unless others need them."""
        try:
            work()
            gone = steps
        except SaveConflict:
            if self.has_links:
                raise
            gone = steps - set(self.run.steps())
        for step in gone:
            self._forget(step)
        self.has_saved = False  # and what no rule keeps goes with the next save
        self._settle()

    @rule(which=SEEDS)
    def delete(self, which: int) -> None:
        self._drain()
        if visible := sorted(self._visible()):
            step = visible[which % len(visible)]
            self._remove({step}, lambda: self.run.delete(step))
            if self.twin is not None:  # which removes parts of earlier steps when it starts
                self._close()
                self._open(self.options)

    # --- restarts --------------------------------------------------------------------------------

    @rule(options=JOBS, which=SEEDS, how=st.sampled_from(["new", "load", "after", "again"]))
    def restart(self, options: JobOptions, which: int, how: str) -> None:
        self._close()
        steps = sorted(self.saved)
        if how == "again" and self.options.after in steps:
            options = replace(options, after=self.options.after)
        elif how == "after" and steps:
            options = replace(options, after=steps[which % len(steps)])
        self._open(options)
        if how != "new" and self._visible():
            self._load(max(self._visible()), bool(which % 2))

    @precondition(lambda self: self.storage != "memory")
    @rule(
        options=JOBS,
        count=st.integers(1, 3),
        loads=st.booleans(),
        overwrites=st.booleans(),
        where=st.sampled_from(DEATHS),
        when=st.sampled_from(["before", "during", "after"]),
        after_ms=st.integers(0, 300),
        seed=SEEDS,
    )
    def kill(
        self, options: JobOptions, count: int, loads: bool, overwrites: bool, where: str, when: str,
        after_ms: int, seed: int,
    ) -> None:  # fmt: skip
        """A job that is killed: what it has committed is there, and what it has not may be."""
        self._close()
        self._open(options)
        # Roles replace a step one after another: killed in between, they have two versions of it.
        overwrites = overwrites and bool(self.saved) and self.twin is None
        if loads and self.saved:
            self.recent = self.saved[max(self.saved)]
            self.branch = self.recent.after
        rng = np.random.default_rng(seed)
        first = self._next() - overwrites
        expected = list[Saved]()
        for step in range(first, first + count):
            self.train(int(rng.integers(99)), 3, 9)
            saved = self._saved(step, float(rng.integers(0, 9)))
            expected.append(saved)
            self.recent = saved
        job = ChildJob(
            *(self.root, self.local, self.twin, self.options, self.frameworks, loads),
            [(saved.step, saved.values, saved.loss) for saved in expected],
            overwrites,
            self.has_links,
            (where, when),
            30.0 if where else after_ms / 1000,
        )
        file = self.folder / "job"
        file.write_bytes(pickle.dumps(job))
        ended = self.forks.wait(self.forks.start(CHILD, str(file)))
        assert ended.code == -9, ended.out
        self.has_uncopied = self.options.is_local and self.local is not None
        self._after_kill(expected, [int(s) for s in ended.out.split() if s.isdigit()])
        self._open(replace(options, after=None))

    def _after_kill(self, expected: list[Saved], told: list[int]) -> None:
        """Finds out which saves a job has committed that was killed."""
        self._open(self.options, settles=False)
        steps = self.run.steps()
        before = dict(self.saved)
        last = max([*told, *(s.step for s in expected if self._is_stored(s, steps))], default=-1)
        for saved in expected:
            if saved.step <= last:
                self._commit(saved)
        # What the rules do not keep may be there still: nobody has removed it yet.
        self.saved |= {s: before[s] for s in steps if s in before and s not in self.saved}
        self.has_saved = False
        self._settle()
        self._check_all()
        self.run.close()

    def _is_stored(self, saved: Saved, steps: list[int]) -> bool:
        """Whether a save that may have been committed was."""
        if saved.step not in steps or saved.step not in self.saved:
            return saved.step in steps
        path, tree = self.run.path(saved.step), self.run.load(step=saved.step)
        trial = replace(saved, values={n: array.copy() for n, array in saved.values.items()})
        try:
            trial.resolve(path)
            trial.check(tree)
        except AssertionError:
            self.saved[saved.step].resolve(path)
            self.saved[saved.step].check(tree)
            return False
        return True

    @rule(which=SEEDS)
    def another_job(self, which: int) -> None:
        """Another job saves, replaces or removes a step, while this one lets it."""
        # Experts that a save does not write are in the step before, which another job may remove.
        if self.options.after is not None or self.options.experts:
            return
        self._drain()
        self.run.release()
        names = ("options", "run", "recent", "branch", "dirty", "state")
        mine = {name: getattr(self, name) for name in names}
        rng = np.random.default_rng(which)
        self.state = State(self.frameworks, first_values(rng))
        self._open(JobOptions(reuse=bool(which % 2), is_local=self.options.is_local))
        steps = sorted(self.saved)
        if which % 3 == 0 or not steps:
            self._save(self._next(), "none", which)
        elif which % 3 == 1:
            self.overwrite("none", which)
        else:
            self._remove({steps[0]}, lambda: self.run.delete(steps[0]))
        self._close()
        for name, value in mine.items():
            setattr(self, name, value)
        self.has_saved, self.is_replaced = False, True
        self._settle()

    # --- what changes nothing --------------------------------------------------------------------

    @rule(which=SEEDS, how=st.sampled_from(["wait", "look", "copy", "move", "clean"]))
    def leave(self, which: int, how: str) -> None:
        """Nothing that is done here changes what the steps hold."""
        self._drain()
        if how == "look":
            self._check_all()
        elif how == "copy" and self._visible():
            self._copy(sorted(self._visible())[which % len(self._visible())])
        elif how == "move" and self.storage != "memory":
            self._move()
        elif how == "clean":
            self.run.release()
            for folder in (self.root, self.local, self.twin):
                if folder is not None and ("://" in folder or os.path.isdir(folder)):
                    save_leftovers.clean(folder, save_leftovers.find(folder).orphans)

    def _copy(self, step: int) -> None:
        """A copy elsewhere is whole."""
        path, there = self.run.path(step), self.folder / "copy"
        self.saved[step].resolve(path)
        unickpt.copy(path, there)
        self.saved[step].check(unickpt.load(there))
        report = unickpt.verify(there)
        assert report.ok, report.damage
        shutil.rmtree(there)

    def _move(self) -> None:
        """The whole run gets another place."""
        self._close()
        before, self.runs = self.folder / self.runs, self.runs + "s"
        after = self.folder / self.runs
        if before.exists():
            before.rename(after)
        folders = (self.root, self.local, self.twin)
        self.root, self.local, self.twin = (
            None if folder is None else str(after / os.path.basename(folder)) for folder in folders
        )
        self._open(self.options)

    def _check_all(self) -> None:
        for step in sorted(self._visible()):
            path = self.run.path(step)
            self.saved[step].resolve(path)
            self.saved[step].check(unickpt.load(path))
            report = unickpt.verify(path)
            assert report.ok, report.damage

    def _check_folders(self) -> None:
        assert contents(self.folder / "beside") == self.beside
        if self.has_links:
            for folder in (self.root, self.local, self.twin):
                # Of roles, one may have a step that does not count: the other lost its part.
                check_tidy(folder, None if self.twin else self.saved)


def _full(*_: Any, **__: Any) -> None:
    raise StorageError("no space left")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    running = Forks(tmp_path_factory.mktemp("jobs"), *PRELOADED["jax"], *PRELOADED["torch"])
    yield running
    running.close()


@pytest.mark.integration
@pytest.mark.hypothesis
@pytest.mark.timeout(6 * 3600)
def test_runs_keep_what_they_saved(jobs: Forks) -> None:
    """Seconds in `make test`, always the same; hours in `make soak`."""
    is_short = settings().derandomize
    Runs.forks = jobs
    run_state_machine_as_test(
        Runs,
        settings=settings(
            max_examples=_FEW if is_short else _MANY,
            stateful_step_count=20 if is_short else 50,
            suppress_health_check=list(HealthCheck),
            print_blob=not is_short,
        ),
    )


def test_a_step_that_is_replaced_twice_has_experts_of_its_first_version(forks: Forks) -> None:
    """Nobody has read the version between: the model, too, must look for them in the first."""
    Runs.forks = forks
    runs = Runs()
    frameworks = ["numpy"] * len(ARRAYS)
    runs.begin("links", False, frameworks, 0, JobOptions(experts=1))
    runs.save(words="none", count=1, wait=False, seed=0)
    runs.train(seed=0, most=1, share=1)
    for _ in range(2):
        runs.overwrite(words="none", seed=0)
    runs.teardown()
