"""The acceptance criteria of ModelExpress's RFC 524, "Delta weight sync requirements"
(github.com/ai-dynamo/modelexpress/issues/524), each as a test; vLLM's part is in
tests/integrations/vllm."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import unickpt
from unickpt import CheckpointCorrupt, CheckpointNotFound, LoadMismatch, Rules, SaveOptions
from unickpt.errors import CheckpointReplaced, RuleError
from unickpt.plugins.weights import Follower, Publisher

pytestmark = pytest.mark.plugins
OPTIONS = SaveOptions(chunk_bytes=1 << 14, fsync=False)
SHAPE = (256, 128)


class Trainer:
    """Changes 1 % of its bf16 weights for each version."""

    def __init__(self, root: Path, **arguments: Any) -> None:
        self.root, self.rng = root, np.random.default_rng(0)
        self.weights = self.rng.standard_normal(SHAPE, np.float32).astype(ml_dtypes.bfloat16)
        self.published = list[np.ndarray[Any, Any]]()
        self.reports = list[Any]()
        self.publisher = Publisher(root, options=OPTIONS, **arguments)

    def publish(self) -> None:
        version = len(self.published)
        words = self.weights.view(np.uint16).reshape(-1)
        words[self.rng.integers(0, words.size, words.size // 100)] ^= 1
        self.published.append(self.weights.copy())
        self.reports.append(self.publisher.publish(version, {"w": self.weights}).result())


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    made = Trainer(tmp_path / "run")
    with made.publisher:
        yield made


def empty() -> dict[str, Any]:
    return {"w": np.zeros(SHAPE, ml_dtypes.bfloat16)}


def test_a_trainer_registers_a_full_anchor_and_a_compressed_delta(trainer: Trainer) -> None:
    trainer.publish()
    trainer.publish()
    anchor, delta = trainer.reports
    assert (anchor.written_bytes, anchor.patched_chunks) == (trainer.weights.nbytes, 0)
    assert delta.patched_chunks == anchor.chunks
    assert delta.written_bytes < 0.02 * anchor.written_bytes
    assert trainer.publisher.versions() == [0, 1]


def test_a_worker_fetches_processes_and_stages_before_the_pause(trainer: Trainer) -> None:
    """Nothing is left to fetch when the engine is asked to pause, which says that all is ready."""
    live = empty()
    trainer.publish()
    with Follower(trainer.root, live) as follower:
        assert follower.update()
        trainer.publish()

        @contextmanager
        def paused() -> Iterator[None]:
            assert live["w"].tobytes() == trainer.published[0].tobytes()
            assert follower.version == 0
            shutil.rmtree(trainer.root / "step_1")
            yield

        assert follower.update(pause=paused)
        assert live["w"].tobytes() == trainer.published[1].tobytes()
        assert follower.last_update is not None
        assert 0 < follower.last_update.staged_bytes < trainer.weights.nbytes // 8


def test_a_worker_pauses_applies_verifies_and_resumes(tmp_path: Path) -> None:
    """An engine that answers meanwhile answers by one version, never by a mixture."""
    trained, served = (torch.nn.Linear(128, 256, dtype=torch.bfloat16) for _ in range(2))
    question, lock, answers = torch.ones(128, dtype=torch.bfloat16), threading.Lock(), set[bytes]()
    stops = threading.Event()

    def serve() -> None:
        while not stops.is_set():
            with lock, torch.no_grad():
                answers.add(served(question).view(torch.uint8).numpy().tobytes())

    expected = set[bytes]()
    with Publisher(tmp_path, options=OPTIONS) as publisher, Follower(tmp_path, served) as follower:
        thread = threading.Thread(target=serve)
        for version in range(10):
            with torch.no_grad():
                trained.weight.view(-1)[version::50] += 0.5
                expected.add(trained(question).view(torch.uint8).numpy().tobytes())
            publisher.publish(version, trained).result()
            assert follower.update(pause=lambda: lock)
            assert follower.version == version
            assert follower.check().ok
            if version == 0:
                thread.start()
        stops.set()
        thread.join()
    assert answers
    assert answers <= expected


def test_a_local_checkpoint_is_patched_on_disk_and_loaded_as_usual(
    trainer: Trainer, tmp_path: Path
) -> None:
    """Only the changed elements of a safetensors file are written; any runtime loads it again."""
    file = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(SHAPE, dtype=torch.bfloat16)}, file)
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    mapped = np.memmap(file, ml_dtypes.bfloat16, "r+", offset=header, shape=SHAPE)
    with Follower(trainer.root, {"w": mapped}) as follower:
        for version in range(4):
            trainer.publish()
            assert follower.update()
            mapped.flush()
            loaded = load_file(file)["w"].view(torch.uint16).numpy()
            assert loaded.tobytes() == trainer.published[version].tobytes()
            assert follower.last_update is not None
            assert not version or follower.last_update.staged_bytes < mapped.nbytes // 8


def damage_patch(root: Path) -> None:
    files = [f for f in root.rglob("*") if "/d/" in f.as_posix() and f.stat().st_nlink == 1]
    largest = max(files, key=lambda file: file.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[40:-40:50] = bytes(len(content[40:-40:50]))
    largest.write_bytes(content)


def other_shape(root: Path) -> None:
    unickpt.save(root, {"w": np.zeros((2, 128), ml_dtypes.bfloat16)}, overwrite=True)


def other_names(root: Path) -> None:
    unickpt.save(root, {"v": np.zeros(SHAPE, ml_dtypes.bfloat16)}, overwrite=True)


def other_layout(root: Path) -> None:
    rules = str(Rules.parse("w [r c] <-> w [c r]"))
    state = {"w": np.zeros(SHAPE, ml_dtypes.bfloat16)}
    unickpt.save(root, state, overwrite=True, metadata={"weights.rules": rules})


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (damage_patch, CheckpointCorrupt),
        (other_shape, LoadMismatch),
        (other_names, LoadMismatch),
        (other_layout, RuleError),
    ],
)
def test_a_delta_is_refused_if_metadata_layout_or_checksum_do_not_match(
    trainer: Trainer, change: Callable[[Path], None], error: type[Exception]
) -> None:
    live = empty()
    trainer.publish()
    with Follower(trainer.root, live) as follower:
        follower.update()
        trainer.publish()
        change(trainer.root / "step_1")
        entered = list[int]()

        @contextmanager
        def paused() -> Iterator[None]:
            entered.append(1)
            yield

        with pytest.raises(error):
            follower.update(pause=paused)
        assert not entered  # refused before the engine pauses
        assert follower.version == 0
        assert live["w"].tobytes() == trainer.published[0].tobytes()


def test_a_delta_is_refused_if_the_base_does_not_match(trainer: Trainer) -> None:
    """Patches are not applied to weights that are not their base; whole chunks are read instead."""
    live = empty()
    trainer.publish()
    with Follower(trainer.root, live) as follower:
        follower.update()
        trainer.publish()
        live["w"][::16] = 7  # in every chunk, behind the follower's back
        assert follower.update()
        assert live["w"].tobytes() == trainer.published[1].tobytes()
        assert follower.last_update is not None
        assert follower.last_update.whole_chunks == follower.last_update.chunks > 1


def test_a_version_that_is_replaced_during_the_update_is_refused(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from unickpt.plugins.weights import follower as module

    live = empty()
    trainer.publish()
    with Follower(trainer.root, live) as follower:
        follower.update()
        trainer.publish()
        stage = module.Follower._staged

        def replace(self: Follower, checkpoint: Any) -> Any:
            staged = stage(self, checkpoint)
            unickpt.save(trainer.root / "step_1", {"w": trainer.published[0]}, overwrite=True)
            return staged

        monkeypatch.setattr(module.Follower, "_staged", replace)
        with pytest.raises(CheckpointReplaced):
            follower.rollback(1)
        assert follower.version == 0
        assert live["w"].tobytes() == trainer.published[0].tobytes()


def test_a_worker_recovers_from_missed_versions_and_restarts(trainer: Trainer) -> None:
    late, restarted = empty(), empty()
    with Follower(trainer.root, late) as follower:
        trainer.publish()
        follower.update()
        for _ in range(20):
            trainer.publish()
        assert follower.update()  # 20 versions were missed
        assert late["w"].tobytes() == trainer.published[20].tobytes()
    restarted["w"][:] = 3  # whatever its memory has
    with Follower(trainer.root, restarted) as follower:
        assert follower.update()
        assert (follower.version, follower.check().ok) == (20, True)
        assert restarted["w"].tobytes() == trainer.published[20].tobytes()


def test_a_worker_falls_back_to_full_weights_if_its_versions_were_removed(tmp_path: Path) -> None:
    made, live = Trainer(tmp_path / "run", keep_last=2), empty()
    with made.publisher:
        made.publish()
        with Follower(made.root, live) as follower:
            follower.update()
        for _ in range(30):
            made.publish()
        made.publisher.wait()
        assert made.publisher.versions() == [29, 30]
        with Follower(made.root, live) as follower:
            assert follower.update()
            assert live["w"].tobytes() == made.published[30].tobytes()
            with pytest.raises(CheckpointNotFound):
                follower.rollback(3)
            assert follower.version == 30


def test_timings_separate_transfer_from_the_pause(trainer: Trainer) -> None:
    """manifest_publish_ms is `phases["commit"]`, fetch_ms `read_s`, process_ms and stage_ms the
    rest of `stage_s`, pause_ms `wait_s`, apply_ms `pause_s`, resume_ms `resume_s`."""
    import time

    trainer.publish()
    trainer.publish()
    assert trainer.reports[1].phases["commit"] > 0

    @contextmanager
    def paused() -> Iterator[None]:
        time.sleep(0.02)  # until requests have ended
        yield
        time.sleep(0.01)

    began = time.perf_counter()
    with Follower(trainer.root, empty()) as follower:
        follower.update(pause=paused)
        seconds = time.perf_counter() - began
        update = follower.last_update
    assert update is not None
    assert update.read_s > 0
    assert update.pause_s > 0
    assert update.wait_s >= 0.02
    assert update.resume_s >= 0.01
    assert update.stage_s + update.wait_s + update.pause_s + update.resume_s <= seconds


def test_the_chain_reconstructs_full_checkpoints_byte_for_byte(trainer: Trainer) -> None:
    versions = 40
    for _ in range(versions):
        trainer.publish()
    assert sum(report.patched_chunks > 0 for report in trainer.reports) > versions // 2
    live = empty()
    with Follower(trainer.root, live) as follower:
        for version in np.random.default_rng(1).permutation(versions).tolist():
            full = trainer.root.parent / "full"
            unickpt.save(full, {"w": trainer.published[version]}, overwrite=True)
            follower.rollback(version)
            expected = unickpt.load(full)["w"].tobytes()
            assert live["w"].tobytes() == expected
            assert unickpt.load(trainer.root / f"step_{version}")["w"].tobytes() == expected
