"""A follower changes the live arrays to a version as a whole, or leaves the old one."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding, PartitionSpec

import unickpt
from unickpt import (
    CheckpointCorrupt,
    CheckpointNotFound,
    LoadMismatch,
    Rules,
    SaveOptions,
    UnickptError,
)
from unickpt.plugins.weights import Follower, Publisher, array_sha256, live_arrays
from unickpt.plugins.weights import follower as follower_module

pytestmark = pytest.mark.plugins
OPTIONS = SaveOptions(chunk_bytes=1 << 14, fsync=False)
ROWS, COLUMNS = 256, 128


class Trainer:
    """Publishes versions of which a few elements change."""

    def __init__(self, root: Path, **arguments: Any) -> None:
        self.rng = np.random.default_rng(0)
        weights = self.rng.standard_normal((ROWS, COLUMNS), np.float32)
        self.state = {"w": weights.astype(ml_dtypes.bfloat16), "b": np.arange(8.0), "n": 1}
        self.versions: dict[int, Any] = {}
        self.publisher = Publisher(root, options=OPTIONS, **arguments)

    def publish(self, version: int) -> None:
        bits = self.state["w"].view(np.uint16).reshape(-1)
        bits[self.rng.integers(0, bits.size, bits.size // 100)] ^= 1
        self.state["b"][version % 8] += 1
        self.versions[version] = {name: np.copy(self.state[name]) for name in "wb"}
        self.publisher.publish(version, self.state).result()


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    made = Trainer(tmp_path / "run")
    with made.publisher:
        yield made


def empty() -> dict[str, Any]:
    return {"w": np.zeros((ROWS, COLUMNS), ml_dtypes.bfloat16), "b": np.zeros(8)}


@contextmanager
def behind(trainer: Trainer, tmp_path: Path) -> Iterator[tuple[Follower, dict[str, Any]]]:
    """A Follower and its arrays: version 0 is live, and 1 is published."""
    live = empty()
    with Follower(tmp_path / "run", live) as follower:
        trainer.publish(0)
        follower.update()
        trainer.publish(1)
        yield follower, live


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(tree[name]).tobytes() for name in "wb"]


def test_each_version_is_live_bit_for_bit_and_only_patches_are_read(
    trainer: Trainer, tmp_path: Path
) -> None:
    live = empty()
    with Follower(tmp_path / "run", live) as follower:
        assert (follower.update(), follower.version) == (False, None)
        for version in range(12):
            trainer.publish(version)
            assert follower.update()
            assert (follower.version, bits(live)) == (version, bits(trainer.versions[version]))
            assert follower.last_update is not None
            if version:
                assert follower.last_update.read_bytes < live["w"].nbytes // 80
                assert follower.last_update.whole_chunks <= 1  # the small array
        assert not follower.update()
        assert follower.check().ok


def test_a_follower_that_fell_behind_or_is_new_reads_patches_too(
    trainer: Trainer, tmp_path: Path
) -> None:
    late, new = empty(), empty()
    with Follower(tmp_path / "run", late) as behind, Follower(tmp_path / "run", new) as other:
        trainer.publish(0)
        behind.update()
        for version in range(1, 8):
            trainer.publish(version)
        assert behind.update()
        assert other.update()
        assert bits(late) == bits(new) == bits(trainer.versions[7])
        assert behind.last_update is not None
        assert behind.last_update.whole_chunks <= 1
        trainer.publish(8)  # refers to the first, which the new one never had
        assert other.update()
        assert bits(new) == bits(trainer.versions[8])
        assert other.last_update is not None
        assert other.last_update.whole_chunks <= 1


def test_followers_of_some_versions_read_patches_and_keep_few_earlier_states(
    trainer: Trainer, tmp_path: Path
) -> None:
    live = empty()
    with Follower(tmp_path / "run", live) as follower:
        for version in range(24):
            trainer.publish(version)
            if version < 18 or version in (21, 23):
                assert follower.update()
                assert bits(live) == bits(trainer.versions[version])
                assert follower.last_update is not None
                assert not version or follower.last_update.whole_chunks <= 1
                for (key, _), chunk in follower._state.chunks.items():
                    assert key == "b" or len(chunk.undo) <= 2 * version.bit_length()


def test_a_change_of_few_elements_is_one_list_in_the_order_of_memory() -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        memory = rng.integers(0, 1 << 16, (12, 40, 50)).astype(np.uint16)
        view = memory.transpose(rng.permutation(3))
        steps = rng.choice([1, 2, -1, -3], 3)
        view = view[tuple(slice(None, None, int(step)) for step in steps)]
        data, before = view.copy(), memory.copy()
        data[rng.random(data.shape) < 0.01] += 1
        change = live_arrays.change_of(view, data)
        assert change is not None
        assert (np.diff(change.index) > 0).all()
        change.apply()
        assert view.tobytes() == data.tobytes()
        assert np.count_nonzero(memory != before) == len(change.index)
        change.revert()
        assert memory.tobytes() == before.tobytes()
    scalar = np.zeros((), np.float32)
    change = live_arrays.change_of(scalar, np.ones((), np.float32))
    assert change is not None
    change.apply()
    assert scalar == 1


def test_an_engine_that_has_the_weights_already_reads_none(
    trainer: Trainer, tmp_path: Path
) -> None:
    trainer.publish(0)
    live = {name: array.copy() for name, array in trainer.versions[0].items()}
    with Follower(tmp_path / "run", live) as follower:
        assert follower.update()
        assert follower.version == 0
        assert follower.last_update is not None
        assert follower.last_update.read_bytes == 0


def test_rollback_and_then_only_newer_versions(trainer: Trainer, tmp_path: Path) -> None:
    live = empty()
    with Follower(tmp_path / "run", live) as follower:
        for version in (0, 3, 4):
            trainer.publish(version)
            follower.update()
        assert follower.rollback(0).version == 0
        assert bits(live) == bits(trainer.versions[0])
        assert (follower.update(), follower.version) == (False, 0)
        trainer.publish(5)
        assert (follower.update(), follower.version) == (True, 5)
        assert bits(live) == bits(trainer.versions[5])
        with pytest.raises(
            CheckpointNotFound, match=r"version 2 is not in .*0, 3, 4, 5.*Version 5"
        ):
            follower.rollback(2)
        assert follower.version == 5


def test_after_a_rollback_a_lower_number_than_one_that_is_gone_counts(tmp_path: Path) -> None:
    live = {"w": np.zeros(3)}
    with Follower(tmp_path / "run", live) as follower:
        for version in (9, 0, 1):
            if version == 0:
                shutil.rmtree(tmp_path / "run")
            with Publisher(tmp_path / "run", options=OPTIONS) as publisher:
                publisher.publish(version, {"w": np.full(3, float(version))}).result()
            assert follower.update() is (version != 0)
            if version == 0:
                follower.rollback(0)
            assert (follower.version, live["w"].tolist()) == (version, [version] * 3)


def test_torch_modules_and_their_tied_parameters(tmp_path: Path) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(64, 32, dtype=torch.bfloat16)
            self.norm = torch.nn.LayerNorm(32)
            self.head = torch.nn.Linear(32, 64, bias=False, dtype=torch.bfloat16)
            self.head.weight = self.embed.weight
            self.register_buffer("scale", torch.ones(3))

    trained, served = Model(), Model()
    address = served.embed.weight.data_ptr()
    with Publisher(tmp_path / "run") as publisher, Follower(tmp_path / "run", served) as follower:
        for version in range(3):
            with torch.no_grad():
                trained.embed.weight[version] += 1
                trained.scale[0] = version
            publisher.publish(version, trained).result()
            assert follower.update()
            for name, tensor in trained.state_dict().items():
                assert torch.equal(served.state_dict()[name], tensor), name
        assert follower.weights is served
        assert served.head.weight.data_ptr() == address
        assert follower.check().ok
        served.norm.weight.data[1] = 7
        assert follower.check().differing == ("norm.weight",)


@pytest.mark.parametrize("swap", [False, True, "pages"])
@pytest.mark.parametrize("how", ["assign", "layer", "data", "tree"])
def test_tensors_that_were_replaced_get_the_whole_version(
    how: str, swap: Any, tmp_path: Path
) -> None:
    trained, served = (torch.nn.Sequential(torch.nn.Linear(200, 300)) for _ in range(2))
    state = dict(served.state_dict())
    like = state if how == "tree" else served
    with (
        Publisher(tmp_path / "run", options=OPTIONS) as publisher,
        Follower(tmp_path / "run", like, swap=swap) as follower,
    ):
        publisher.publish(0, trained).result()
        follower.update()
        zeros = {name: torch.zeros_like(tensor) for name, tensor in trained.state_dict().items()}
        if how == "assign":
            served.load_state_dict(zeros, assign=True)
        elif how == "layer":
            served[0] = torch.nn.Linear(200, 300)
        elif how == "data":
            for name, parameter in served.named_parameters():
                parameter.data = zeros[name]
        else:
            state.update(zeros)
        assert follower.check().differing == ("0.weight", "0.bias")
        with torch.no_grad():
            trained[0].weight[0, 0] += 1
        publisher.publish(1, trained).result()
        assert follower.update()
        live = state if how == "tree" else served.state_dict()
        assert all(torch.equal(live[name], trained.state_dict()[name]) for name in live)
        assert follower.check().ok


def test_tensors_take_other_memory_in_the_flip(tmp_path: Path) -> None:
    trained, served = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
    big = torch.zeros(100)
    state = {"a": trained.weight, "b": trained.bias, "view": torch.zeros(10), "n": np.zeros(4)}
    like = {"a": served.weight, "b": served.bias, "view": big[:10], "n": np.zeros(4)}
    with (
        Publisher(tmp_path / "run", options=OPTIONS) as publisher,
        Follower(tmp_path / "run", like, swap=True) as follower,
    ):
        for version in range(4):
            with torch.no_grad():
                trained.weight[version] += 1
                state["view"][version], state["n"][version] = version, version
            publisher.publish(version, state).result()
            old, bias = served.weight.detach(), served.bias.data_ptr()
            before = old.clone()
            assert follower.update()
            assert torch.equal(served.weight, trained.weight)
            assert served.weight.data_ptr() != old.data_ptr()
            assert torch.equal(old, before)  # whoever still computes with it is not disturbed
            assert (served.bias.data_ptr() == bias) == (version > 0)
            assert torch.equal(big[:10], state["view"])
            assert np.array_equal(like["n"], state["n"])
            assert follower.check().ok
        assert follower.weights is like
        assert served.weight.requires_grad


def test_jax_arrays_are_replaced_with_their_sharding(trainer: Trainer, tmp_path: Path) -> None:
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    sharding = NamedSharding(mesh, PartitionSpec(None, "x"))
    like = {
        "w": jax.device_put(jnp.zeros((ROWS, COLUMNS), jnp.bfloat16), sharding),
        "b": jnp.zeros(8, jnp.float32),
    }
    rules = Rules.parse("w [...] <-> w [...]\nb [...] as float64 <-> b [...] as float32")
    with Follower(tmp_path / "run", like, rules=rules) as follower:
        for version in range(3):
            trainer.publish(version)
            assert follower.update()
            weights = follower.weights
            assert weights["w"].sharding == sharding
            assert np.asarray(weights["w"]).tobytes() == bits(trainer.versions[version])[0]
            assert np.array_equal(weights["b"], trainer.versions[version]["b"].astype(np.float32))
            assert follower.last_update is not None
            assert follower.last_update.whole_chunks == (0 if version else 4)
        assert not np.asarray(like["w"]).any()  # arrays that the engine still uses do not change
        assert follower.check().ok


def test_rules_of_the_publisher_move_axes(tmp_path: Path) -> None:
    rules = Rules.parse("w [(h r) c] <-> heads [h c r]\nb [n] <-> bias [n]\nn <-> drop")
    made = Trainer(tmp_path / "run", rules=rules)
    live = {"heads": np.zeros((4, COLUMNS, ROWS // 4), ml_dtypes.bfloat16), "bias": np.zeros(8)}
    with made.publisher, Follower(tmp_path / "run", live) as follower:
        for version in range(4):
            made.publish(version)
            assert follower.update()
            w = made.versions[version]["w"].reshape(4, ROWS // 4, COLUMNS).transpose(0, 2, 1)
            assert live["heads"].tobytes() == np.ascontiguousarray(w).tobytes()
            assert live["bias"].tobytes() == made.versions[version]["b"].tobytes()
            assert follower.last_update is not None
            assert not version or follower.last_update.whole_chunks <= 1
        assert follower.check().ok


@pytest.mark.parametrize("keep_copies", [False, True])
def test_a_rank_with_a_part_of_each_chunk(
    trainer: Trainer, tmp_path: Path, keep_copies: bool
) -> None:
    half = np.zeros((ROWS, COLUMNS // 2), ml_dtypes.bfloat16)
    box = unickpt.types.Box((0, COLUMNS // 2), (ROWS, COLUMNS))
    like = {"w": unickpt.types.LocalFragments((ROWS, COLUMNS), [(box, half)])}
    with Follower(tmp_path / "run", like, rank=1, keep_copies=keep_copies) as follower:
        for version in range(5):
            trainer.publish(version)
            assert follower.update()
            w = np.ascontiguousarray(trainer.versions[version]["w"][:, COLUMNS // 2 :])
            assert half.tobytes() == w.tobytes()
            assert follower.last_update is not None
            is_whole = follower.last_update.whole_chunks > 0
            assert is_whole == (version == 0 or not keep_copies)
        assert follower.check().ok


def test_scattered_memory_and_several_dtypes(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    state = {
        "f": rng.random((64, 48)),
        "c": rng.random((16, 8)) + 1j,
        "i": np.arange(100, dtype=np.int8),
        "s": np.float32(3),
        "e": np.zeros((0, 4)),
    }
    live = {
        "f": np.zeros((48, 64)).T,
        "c": np.zeros((16, 16), np.complex128)[:, ::2],
        "i": torch.zeros(200, dtype=torch.int8)[::2],
        "s": np.zeros((), np.float32),
        "e": np.zeros((0, 4)),
    }
    with (
        Publisher(tmp_path / "run", options=OPTIONS) as publisher,
        Follower(tmp_path / "run", live) as follower,
    ):
        for version in range(3):
            state["f"][version, ::7] = -0.0 if version else np.nan
            state["c"][version] = np.nan
            state["i"][version] = -1
            publisher.publish(version, state).result()
            assert follower.update()
            for name, array in state.items():
                assert np.asarray(live[name]).tobytes() == np.asarray(array).tobytes(), name
        assert follower.check().ok


def test_what_does_not_fit_leaves_the_old_version(trainer: Trainer, tmp_path: Path) -> None:
    live = empty()
    with Follower(tmp_path / "run", live) as follower:
        trainer.publish(0)
        follower.update()
        trainer.state["b"] = np.arange(9.0)
        trainer.publish(1)
        with pytest.raises(LoadMismatch, match=r"(?s)b.*a Follower takes rules="):
            follower.update()
        assert (follower.version, bits(live)) == (0, bits(trainer.versions[0]))


def test_a_failure_during_the_flip_is_undone(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with behind(trainer, tmp_path) as (follower, live):
        apply, calls = live_arrays.ElementsChange.apply, list[int]()

        def failing(change: Any) -> None:
            calls.append(1)
            apply(change)
            if len(calls) == 4:
                raise MemoryError("provoked")

        with monkeypatch.context() as patch:
            patch.setattr(live_arrays.ElementsChange, "apply", failing)
            with pytest.raises(MemoryError, match="provoked"):
                follower.update()
        assert len(calls) >= 4
        assert (follower.version, bits(live)) == (0, bits(trainer.versions[0]))
        assert follower.update()
        assert (follower.version, bits(live)) == (1, bits(trainer.versions[1]))


def test_an_interrupt_while_the_flip_starts_its_threads_is_undone() -> None:
    live = np.zeros(3)
    changes = [live_arrays.change_of(live[i : i + 1], np.ones(1)) for i in range(3)]
    submit, calls = live_arrays.Pool.submit, list[int]()

    def interrupted(pool: Any, apply: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return submit(pool, apply)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live_arrays.Pool, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            live_arrays.flip([change for change in changes if change], threads=3)
    assert live.tolist() == [0, 0, 0]


def test_the_version_is_reported_after_the_flip(trainer: Trainer, tmp_path: Path) -> None:
    with behind(trainer, tmp_path) as (follower, live):

        @contextmanager
        def pause() -> Iterator[None]:
            assert (follower.version, bits(live)) == (0, bits(trainer.versions[0]))
            yield
            assert (follower.version, bits(live)) == (0, bits(trainer.versions[1]))

        assert follower.update(pause=pause)
        assert follower.version == 1


def test_leaves_that_share_a_part_of_their_memory_are_refused(tmp_path: Path) -> None:
    with Publisher(tmp_path / "run") as publisher:
        publisher.publish(0, {"a": np.full(4, 1.0), "b": np.full(4, 2.0)}).result()
    memory = np.zeros(6)
    like = {"a": memory[:4], "b": memory[2:]}
    with Follower(tmp_path / "run", like) as follower:
        with pytest.raises(LoadMismatch, match="'a' and 'b' of `like` share a part"):
            follower.update()
        assert (follower.version, memory.tolist()) == (None, [0.0] * 6)
    with Follower(tmp_path / "run", {"a": memory[:4]}) as follower:
        assert follower.update()


def test_a_folder_without_versions_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Follower(tmp_path / "mistyped", empty()) as follower:
        assert [follower.update() for _ in range(3)] == [False, False, False]
    assert caplog.text.count("mistyped: no version is published there yet") == 1


@pytest.mark.parametrize("error", [OSError, CheckpointNotFound])
def test_a_pause_whose_end_fails_leaves_the_new_version(
    error: type[Exception], trainer: Trainer, tmp_path: Path
) -> None:
    @contextmanager
    def pause() -> Iterator[None]:
        yield
        raise error("the engine is gone")

    with behind(trainer, tmp_path) as (follower, live):
        with pytest.raises(error, match="the engine is gone"):
            follower.update(pause=pause)
        assert (follower.version, bits(live)) == (1, bits(trainer.versions[1]))
        assert follower.check().ok
        trainer.publish(2)
        assert follower.update()
        assert (follower.version, bits(live)) == (2, bits(trainer.versions[2]))


@pytest.mark.parametrize("call", ["update", "rollback", "check", "close"])
def test_a_pause_that_calls_the_follower_leaves_the_old_version(
    call: str, trainer: Trainer, tmp_path: Path
) -> None:
    with behind(trainer, tmp_path) as (follower, live):

        @contextmanager
        def pause() -> Iterator[None]:
            trainer.publish(2)
            getattr(follower, call)(*[0] * (call == "rollback"))
            yield

        with pytest.raises(UnickptError, match="within an update"):
            follower.update(pause=pause)
        assert (follower.version, bits(live)) == (0, bits(trainer.versions[0]))
        assert follower.update()
        assert (follower.version, bits(live)) == (2, bits(trainer.versions[2]))
        assert follower.check().ok


def test_a_pause_that_suppresses_errors_hides_no_failed_flip(
    trainer: Trainer, tmp_path: Path
) -> None:
    with behind(trainer, tmp_path) as (follower, live):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(live_arrays.ElementsChange, "apply", lambda change: 1 // 0)
            with pytest.raises(UnickptError, match="version 0 stays live"):
                follower.update(pause=lambda: suppress(ZeroDivisionError))
        assert (follower.version, bits(live)) == (0, bits(trainer.versions[0]))


def test_weights_that_someone_changed_are_corrected_where_a_version_changes_them(
    trainer: Trainer, tmp_path: Path
) -> None:
    live = empty()
    with Follower(tmp_path / "run", live) as follower:
        trainer.publish(0)
        follower.update()
        live["w"][...] = 0
        assert follower.check().differing == ("w",)
        trainer.publish(1)
        assert follower.update()
        assert bits(live) == bits(trainer.versions[1])


def test_a_replaced_version_is_noticed(trainer: Trainer, tmp_path: Path) -> None:
    live = empty()
    with Follower(tmp_path / "run", live) as follower:
        trainer.publish(0)
        follower.update()
        other = {"w": trainer.state["w"] * 2, "b": trainer.state["b"] + 1}
        unickpt.save(tmp_path / "run/step_0", other, overwrite=True)
        with pytest.raises(CheckpointNotFound, match="replaced"):
            follower.check()
        assert follower.update()
        assert bits(live) == bits(other)
        assert follower.check().ok


def test_versions_that_are_gone_are_not_unlearned_silently(
    trainer: Trainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    live = empty()
    with Follower(tmp_path / "run", live) as follower:
        for version in range(2):
            trainer.publish(version)
            follower.update()
        unickpt.extend.local_folders.remove(str(tmp_path / "run/step_1"))
        with caplog.at_level(logging.WARNING, "unickpt"):
            assert not follower.update()
        assert "version 1 is live here, but the newest there is 0" in caplog.text
        with pytest.raises(CheckpointNotFound):
            follower.check()
        assert follower.rollback(0).version == 0
        assert bits(live) == bits(trainer.versions[0])


def test_a_version_that_is_removed_during_the_update_is_not_half_live(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with behind(trainer, tmp_path) as (follower, live):
        staged = follower_module.Stager.stage

        def removing(stager: Any) -> Any:
            result = staged(stager)
            unickpt.extend.local_folders.remove(str(tmp_path / "run/step_1"))
            return result

        monkeypatch.setattr(follower_module.Stager, "stage", removing)
        assert not follower.update()
        assert (follower.version, bits(live)) == (0, bits(trainer.versions[0]))


def test_random_damage_leaves_the_old_version_or_the_right_one(tmp_path: Path) -> None:
    made = Trainer(tmp_path / "run")
    with made.publisher:
        made.publish(0)
        made.publish(1)
    new = [
        file
        for file in sorted((tmp_path / "run/step_1").rglob("*"))
        if file.is_file() and file.stat().st_nlink == 1
    ]
    rng, errors = np.random.default_rng(0), 0
    for _ in range(40):
        file = new[rng.integers(len(new))]
        content = file.read_bytes()
        damaged = bytearray(content)
        damaged[rng.integers(len(damaged))] ^= 1 << rng.integers(8)
        live = {name: array.copy() for name, array in made.versions[0].items()}
        with Follower(tmp_path / "run", live) as follower:
            follower.rollback(0)
            file.write_bytes(damaged)
            try:
                assert follower.rollback(1).version == 1
                assert bits(live) == bits(made.versions[1])
            except unickpt.UnickptError:
                errors += 1
                assert (follower.version, bits(live)) == (0, bits(made.versions[0]))
            file.write_bytes(content)
    assert errors > 10


def test_a_damaged_patch_says_which_array(trainer: Trainer, tmp_path: Path) -> None:
    with behind(trainer, tmp_path) as (follower, live):
        files = [f for f in (tmp_path / "run/step_1").rglob("*") if "/d/" in f.as_posix()]
        largest = max((f for f in files if f.stat().st_nlink == 1), key=lambda f: f.stat().st_size)
        content = bytearray(largest.read_bytes())
        content[40 : len(content) - 40 : 50] = bytes(len(content[40 : len(content) - 40 : 50]))
        largest.write_bytes(content)
        with pytest.raises(CheckpointCorrupt, match="'w'"):
            follower.update()
        assert (follower.version, bits(live)) == (0, bits(trainer.versions[0]))
        trainer.publish(2)  # refers to version 0
        assert follower.update()
        assert bits(live) == bits(trainer.versions[2])


def test_the_expected_sha256_are_those_of_any_program(trainer: Trainer, tmp_path: Path) -> None:
    import hashlib

    trainer.publish(0)
    expected = array_sha256(tmp_path / "run/step_0", empty())
    assert expected == {
        name: hashlib.sha256(array.tobytes()).hexdigest()
        for name, array in trainer.versions[0].items()
    }


def test_a_follower_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lease_s"):
        Follower(tmp_path, {}, lease_s=0)
    with Follower(tmp_path / "none", empty()) as follower:
        assert not follower.update()
        with pytest.raises(ValueError, match="no version is live yet"):
            follower.check()
    with pytest.raises(ValueError, match="is closed"):
        follower.update()
