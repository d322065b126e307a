"""A training run, and beside it a model of it: which steps must exist, and what each must hold."""

from __future__ import annotations

import functools
import os
import pickle
import secrets
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np

import unickpt
from support.quantized import codes_of
from support.run_folders import refuse
from unickpt import Checkpointer, Retention, SaveOptions, UnickptError
from unickpt.runs import save_leftovers
from unickpt.storage import paths
from unickpt.types import PendingSave

Array = np.ndarray[Any, Any]

# Name: shape and dtype of an array of the state. Rows of `w` and `h` lie in many chunks.
ARRAYS: dict[str, tuple[tuple[int, ...], Any]] = {
    "w": ((256, 64), np.float32),
    "h": ((4000, 10), ml_dtypes.bfloat16),
    "frozen": ((3000, 8), np.float32),
    "q": ((24, 100), np.float32),
    "scalar": ((), np.float32),
    "empty": ((0, 3), np.int8),
    "moe": ((4, 300), np.float32),
    **{f"ex/{number}": ((400,), np.float32) for number in range(5)},
}
FRAMEWORKS = ("numpy", "jax", "sharded", "torch")
"""Where an array of the state is: "sharded" is JAX's, in parts on eight devices."""
_SHARDED = {"w", "frozen", "moe"}
EXPERTS = {"ex/{x}": "ex/{}", "moe": "moe"}


# --- a state ------------------------------------------------------------------------------------


def _to_framework(name: str, array: Array, framework: str) -> Any:
    if framework == "numpy":
        return array.copy()
    if framework == "torch":
        import torch

        whole = np.ascontiguousarray(array).reshape(array.shape).copy()
        if array.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(whole.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(whole)
    import jax

    if framework == "jax" or name not in _SHARDED:
        return jax.device_put(array.copy(), jax.devices()[0])
    mesh = jax.make_mesh((2, 2), ("x", "y"), devices=jax.devices()[:4])
    parts = jax.sharding.PartitionSpec("x", "y")
    return jax.device_put(array.copy(), jax.sharding.NamedSharding(mesh, parts))


def to_numpy(value: Any) -> Array:
    """A copy of an array of any framework."""
    if type(value).__module__.startswith("torch"):
        import torch

        if value.dtype == torch.bfloat16:
            return value.view(torch.int16).numpy().copy().view(ml_dtypes.bfloat16)
        return value.detach().numpy().copy()
    return np.array(value)


class State:
    """What a program trains: arrays of several frameworks.

    Arguments:
        frameworks: of each array, by name.
        values: what they hold.
    """

    def __init__(self, frameworks: Mapping[str, str], values: Mapping[str, Array]) -> None:
        self.frameworks = frameworks
        self.arrays = {n: _to_framework(n, values[n], frameworks[n]) for n in ARRAYS}

    def tree(self, step: int) -> dict[str, Any]:
        """The tree that is saved."""
        found: dict[str, Any] = {"ex": {}, "step": step, "text": f"step {step}"}
        for name, array in self.arrays.items():
            first, _, last = name.partition("/")
            (found[first] if last else found).__setitem__(last or first, array)
        return found

    def values(self) -> dict[str, Array]:
        """A copy of what the arrays hold."""
        return {name: to_numpy(array) for name, array in self.arrays.items()}

    def change(self, name: str, rows: Array, rng: np.random.Generator) -> None:
        """Changes rows of an array, in place where its framework does so."""
        if not rows.any():
            return
        array, framework = self.arrays[name], self.frameworks[name]
        value = to_numpy(array)
        new = value[rows] if value.ndim else value
        new = rng.integers(-99, 99, new.shape).astype(value.dtype)
        if framework == "numpy":
            array[rows if value.ndim else ()] = new
        elif framework == "torch":
            import torch

            target = torch.from_numpy(np.flatnonzero(rows))
            made = _to_framework(name, new, framework)
            array.index_copy_(0, target, made) if value.ndim else array.copy_(made)
        else:
            value[rows if value.ndim else ()] = new
            self.arrays[name] = _to_framework(name, value, framework)

    def like(self) -> dict[str, Any]:
        """A tree for `load`, which has other values."""
        other = {name: np.full(shape, 7, dtype) for name, (shape, dtype) in ARRAYS.items()}
        return State(self.frameworks, other).tree(-1)


def first_values(rng: np.random.Generator) -> dict[str, Array]:
    return {n: rng.integers(-9, 9, shape).astype(d) for n, (shape, d) in ARRAYS.items()}


def flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays of a tree by name."""
    experts = {f"ex/{number}": value for number, value in tree["ex"].items()}
    return {name: experts.get(name, tree.get(name)) for name in ARRAYS}


# --- a job --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JobOptions:
    """How a job saves; see `Checkpointer` and `SaveOptions`. `quantize` is "restores" for
    `Restores`; `experts` is how many of each key a save writes, 0 for all."""

    reuse: bool | str = True
    compression: str | None = None
    quantize: str | None = None
    experts: int = 0
    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: int | None = None
    staging: str = "auto"
    chunk_bytes: int = 4096
    is_local: bool = True
    after: int | None = None

    def save_options(self, **others: Any) -> SaveOptions:
        codes: Any = unickpt.Restores(1) if self.quantize == "restores" else self.quantize
        made: dict[str, Any] = {
            "fsync": False,
            "timeout_s": 30,
            "compression": self.compression,
            "quantize": {"q": codes} if codes else {},
            "staging": self.staging,
            "chunk_bytes": self.chunk_bytes,
        }
        return SaveOptions(**{**made, **others})

    def open(self, root: str, local: str | None, twin: str | None) -> Checkpointer | Roles:
        """Opens a job.

        Arguments:
            root, local: its folders.
            twin: the folder of a second role, if there is one.
        """
        if twin is not None:
            return Roles(*(self._open(r, roles=(root, twin)) for r in (root, twin)))
        return self._open(root, local=local if self.is_local else None, after=self.after)

    def _open(self, root: str, **folders: Any) -> Checkpointer:
        experts = None
        if self.experts:
            experts = unickpt.Experts(
                {"ex/{x}": self.experts, "moe": (0, self.experts)}, plt_budget=None
            )
        return Checkpointer(
            root,
            **folders,
            reuse=self.reuse,  # type: ignore[arg-type]
            experts=experts,
            keep=self.retention,
            options=self.save_options(),
        )

    @property
    def retention(self) -> Retention:
        metric = "loss" if self.keep_best else None
        return Retention(self.keep_last, self.keep_every, self.keep_best, metric)

    def kept(self, losses: Mapping[int, float]) -> set[int]:
        """Which steps the rules keep, told anew: not by the code that is tested."""
        if self.keep_last is self.keep_every is self.keep_best is None:
            return set(losses)
        steps = sorted(losses)
        kept = set(steps[-(self.keep_last or 1) :])
        kept |= {step for step in steps if self.keep_every and step % self.keep_every == 0}
        best = sorted(steps, key=lambda step: (losses[step], -step))
        return kept | set(best[: self.keep_best or 0])


@functools.cache
def _quantised(
    data: bytes, shape: tuple[int, ...], dtype: str, codes: str, chunk_bytes: int
) -> Array:
    path = f"memory://quantised/{secrets.token_hex(6)}"
    array = np.frombuffer(data, dtype).reshape(shape)
    options = SaveOptions(quantize={"q": codes}, chunk_bytes=chunk_bytes)
    unickpt.save(path, {"q": array}, options=options)
    found: Array = to_numpy(unickpt.load(path)["q"])
    paths.resolve(path).remove(paths.context())
    return found


@dataclass
class Saved:
    """What one save was given.

    Arguments:
        step: its number.
        values: of the arrays.
        options: of the job.
        base: the step before of the same job, saved or loaded, from which experts are taken.
        after: `after` of the branch to which the step belongs.
        loss: its metric.
    """

    step: int
    values: dict[str, Array]
    options: JobOptions
    base: Saved | None = None
    after: int | None = None
    loss: float = 0.0
    turns: dict[str, dict[str, int]] | None = None
    """Of which step each expert is; known once the step was read."""
    is_resolved: bool = False

    def resolve(self, path: str) -> None:
        """Makes `values` those that the step must hold, by what it says of its experts and codes,
        and checks what it says."""
        if self.is_resolved:
            return
        opened = unickpt.open(path)
        codes = codes_of(opened.index.arrays["q"])
        asked = self.options.quantize
        assert (codes is None) == (asked is None), (codes, asked)
        if codes is not None:
            assert codes == asked or (asked == "restores" and codes in ("int2", "uint8")), codes
            q = self.values["q"]
            chunk_bytes = self.options.chunk_bytes
            self.values["q"] = _quantised(q.tobytes(), q.shape, q.dtype.name, codes, chunk_bytes)
        recorded = opened.metadata["unickpt"].get("experts", {}).get("steps", {})
        assert bool(recorded) == bool(self.options.experts), recorded
        self.turns = {key: {str(x): n for x, n in recorded[key].items()} for key in recorded}
        replaced = self.base if self.base is not None and self.base.step == self.step else None
        for key, turns in self.turns.items():
            for expert, step in turns.items():
                if step != self.step:
                    self._take_expert(key, expert, step, path)
                elif replaced is not None:
                    self._take_replaced(key, expert, replaced, path)
            newest = sum(step == self.step for step in turns.values())
            assert newest >= min(self.options.experts, len(turns)), turns
        self.base, self.is_resolved = None, True

    def _take_expert(self, key: str, expert: str, step: int, path: str) -> None:
        """Takes the state of an expert from the last save that wrote it."""
        saved = self.base
        while saved is not None and not saved.is_resolved and saved.step != step:
            saved = saved.base  # it was removed before it was looked at
        assert saved is not None, f"step {self.step}: expert {expert} of {key} is of step {step}"
        if saved.is_resolved and saved.turns:
            assert saved.turns[key][expert] == step, (self.turns, saved.turns)
        else:
            assert saved.step == step, (step, saved.step)
            if saved.base is not None and saved.base.step == step:
                self._take_replaced(key, expert, saved, path)
                return
        name = EXPERTS[key].format(expert)
        at = int(expert) if key == "moe" else ...
        self.values[name][at] = saved.values[name][at]

    def _take_replaced(self, key: str, expert: str, replaced: Saved, path: str) -> None:
        """Takes the state of an expert from a version of a step that was replaced, if it is of
        that: all are of one step. What replaced a version that was never read is not known
        either, so that the state may be of any before."""
        name = EXPERTS[key].format(expert)
        at = int(expert) if key == "moe" else ...
        found = to_numpy(flat(unickpt.load(path))[name])
        version: Saved | None = replaced
        while version is not None and version.step == replaced.step:
            if np.array_equal(found[at], version.values[name][at]):
                self.values[name][at] = version.values[name][at]
                return
            version = version.base

    def check(self, tree: Mapping[str, Any]) -> None:
        """Raises AssertionError unless a tree is that of this step, bit for bit."""
        arrays = flat(tree)
        for name, expected in self.values.items():
            found = to_numpy(arrays[name])
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape), name
            if found.tobytes() != expected.tobytes():
                bad = np.flatnonzero((found != expected).reshape(-1))
                raise AssertionError(
                    f"step {self.step}: {name} differs in {len(bad)} elements, from {bad[:5]} on: "
                    f"{found.reshape(-1)[bad[:5]]}, not {expected.reshape(-1)[bad[:5]]}"
                )
        assert (tree["step"], tree["text"]) == (self.step, f"step {self.step}")


class Roles:
    """Two roles of one job, used as a Checkpointer: the second saves a part of what the first does.

    Arguments:
        first, second: each with its folder.
    """

    def __init__(self, first: Checkpointer, second: Checkpointer) -> None:
        self._both = first, second
        self.steps, self.latest, self.path = first.steps, first.latest, first.path

    def prepare(self, tree: Mapping[str, Any]) -> None:
        self._both[0].prepare(tree)
        self._both[1].prepare(_part_of(tree))

    def save(
        self, step: int, tree: Mapping[str, Any], changed: Any = None, **arguments: Any
    ) -> RolesPending:
        words: Literal["tracked"] | None = None if changed is None else "tracked"
        return RolesPending(
            self._both[0].save(step, tree, changed=changed, **arguments),
            self._both[1].save(step, _part_of(tree), changed=words, **arguments),
        )

    def load(self, like: Any = None, step: int | None = None) -> Any:
        first, second = (
            role.load(like if role is self._both[0] else None, step=step) for role in self._both
        )
        assert first["step"] == second["step"]
        for name in ("scalar", "moe", "q"):
            assert to_numpy(first[name]).tobytes() == to_numpy(second[name]).tobytes(), name
        return first

    def drop_later_steps(self) -> None:
        for role in self._both:
            role.drop_later_steps()

    def delete(self, step: int) -> None:
        for role in self._both:
            role.delete(step)

    def wait(self) -> None:
        for role in self._both:
            role.wait()

    def release(self) -> None:
        for role in self._both:
            role.release()

    def close(self) -> None:
        for role in self._both:
            role.close()


def _part_of(tree: Mapping[str, Any]) -> dict[str, Any]:
    """What the second role saves."""
    return {name: tree[name] for name in ("scalar", "moe", "q", "ex", "step", "text")}


class RolesPending:
    """The saves of both roles, as one."""

    def __init__(self, *saves: PendingSave) -> None:
        self._saves = saves

    def wait_staged(self) -> None:
        for save in self._saves:
            save.wait_staged()

    def result(self) -> None:
        errors = list[UnickptError]()
        for save in self._saves:
            try:
                save.result()
            except UnickptError as error:
                errors.append(error)
        if errors:
            raise errors[0]


# --- a child that is killed -----------------------------------------------------------------------


@dataclass(frozen=True)
class ChildJob:
    """What a child does until it is killed.

    Arguments:
        root, local, twin: the folders; see `JobOptions.open`.
        options: how it saves.
        frameworks: of the arrays.
        loads: whether it loads the newest step first.
        saves: each step that it saves, with what it holds, its loss, and what changed.
        overwrites: whether the first of them replaces a step.
        has_links: whether the storage has hard links.
        dies: see `support.dying.die_at`.
        after_s: when it is killed, whatever it does.
    """

    root: str
    local: str | None
    twin: str | None
    options: JobOptions
    frameworks: dict[str, str]
    loads: bool
    saves: list[tuple[int, dict[str, Array], float]]
    overwrites: bool
    has_links: bool
    dies: tuple[str, str]
    after_s: float


CHILD = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from support.run_model import run_child
run_child(ARGS[0])
"""


def run_child(path: str) -> None:
    """Does what the `ChildJob` in a file says; tells each step whose save has ended."""
    from support.dying import die, die_at

    job: ChildJob = pickle.loads(Path(path).read_bytes())
    die_at(*job.dies)
    if not job.has_links:
        os.link = refuse
    threading.Timer(job.after_s, die).start()
    run = job.options.open(job.root, job.local, job.twin)
    if job.loads and run.latest() is not None:
        run.load()
    print("ready", flush=True)
    pending = []
    for number, (step, values, loss) in enumerate(job.saves):
        tree = State(job.frameworks, values).tree(step)
        overwrite = job.overwrites and number == 0
        pending.append((step, run.save(step, tree, metrics={"loss": loss}, overwrite=overwrite)))
        pending[-1][1].wait_staged()
        if number % 2:
            pending[-1][1].result()
            print("committed", step, flush=True)
    for step, save in pending:
        save.result()
        print("committed", step, flush=True)
    run.close()
    die()


# --- folders --------------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {
        os.path.relpath(os.path.join(at, name), folder): Path(at, name).read_bytes()
        for at, _, names in os.walk(folder)
        for name in names
    }


def check_tidy(folder: str | None, steps: Collection[int] | None) -> None:
    """Raises AssertionError if a folder on disk has more than whole steps, after `clean`.

    Arguments:
        folder: of steps; nothing is checked if it is not there.
        steps: all that it may have; None for any.
    """
    if folder is None or not os.path.isdir(folder):
        return
    found = save_leftovers.find(folder)
    assert found.holder is None, found.holder
    save_leftovers.clean(folder, found.orphans)
    for name in os.listdir(folder):
        if name in (".unickpt.lock", ".unickpt.apart"):
            continue
        inside = sorted(contents(Path(folder, name)))
        assert name.startswith("step_"), f"debris: {name}: {inside}"
        is_known = steps is None or int(name.removeprefix("step_")) in steps
        assert is_known, f"debris: {name}: {inside}"
        attempts = os.listdir(Path(folder, name, "processes"))
        assert len(attempts) == 1, f"debris: {name}: {inside}"
