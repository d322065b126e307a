"""Damages to sealed folders: a load raises, or gives what was sealed; `unickpt seal --check` always
says what differs.

    python tests/seal_soak.py --damages 10000

The folders are of safetensors in one file and in several, and of GGUF; with large blocks, and with
small ones. A load is one of all arrays, of some, of a part, of a file alone, or that of an engine.
Without its seal, a folder opens as before it was sealed, so loads require it by a hint.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import unickpt
from unickpt import CheckpointCorrupt, UnickptError
from unickpt.errors import UnsupportedFormat
from unickpt.plugins.seal import check_seal, seal, seal_file, sealing

ARRAYS: dict[str, np.ndarray[Any, Any]] = {
    "a.weight": np.arange(3000, dtype=np.float32).reshape(60, 50),
    "b.weight": np.arange(500).astype(ml_dtypes.bfloat16),
    "c.bias": np.arange(7, dtype=np.int8),
}
SMALL_BLOCK_BYTES = 128
Maker = Callable[[Path], None]


def make_safetensors(folder: Path) -> None:
    """A folder of one file."""
    folder.mkdir(exist_ok=True)
    unickpt.save(folder / "ours", ARRAYS)
    unickpt.convert(folder / "ours", folder / "sealed", to="hf")
    shutil.rmtree(folder / "ours")
    (folder / "sealed/config.json").write_text('{"layers": 2}')


def make_sharded(folder: Path) -> None:
    """A folder of several files with an index."""
    folder.mkdir(exist_ok=True)
    unickpt.save(folder / "ours", ARRAYS)
    unickpt.convert(folder / "ours", folder / "sealed", to="hf", max_shard_size=5000)
    shutil.rmtree(folder / "ours")
    (folder / "sealed/config.json").write_text('{"layers": 2}')


def make_gguf(folder: Path) -> None:
    (folder / "sealed").mkdir(parents=True)
    writer = gguf.GGUFWriter(folder / "sealed/model.gguf", "llama")
    for name, array in ARRAYS.items():
        is_bf16 = array.dtype == ml_dtypes.bfloat16
        data = array.view(np.uint8) if is_bf16 else array
        kind = gguf.GGMLQuantizationType.BF16 if is_bf16 else None
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (folder / "sealed/README.md").write_text("a model")


MAKERS: list[Maker] = [make_safetensors, make_sharded, make_gguf]


@contextmanager
def block_size(nbytes: int) -> Iterator[None]:
    """Seals have blocks of this size."""
    before, sealing.BLOCK_BYTES = sealing.BLOCK_BYTES, nbytes
    try:
        yield
    finally:
        sealing.BLOCK_BYTES = before


# --- damages --------------------------------------------------------------------------------------


class Damage:
    """One damage to a folder.

    Arguments:
        folder: the sealed one.
        older: it before it was sealed the last time, with the seal of then.
        rng: of what happens.
    """

    def __init__(self, folder: Path, older: Path, rng: random.Random) -> None:
        self.folder, self.older, self._rng = folder, older, rng
        self.files = sorted(file for file in folder.iterdir() if file.is_file())
        self.weights = [f for f in self.files if f.suffix in seal_file.FORMATS.values()]
        self.file = rng.choice([rng.choice(self.files), rng.choice(self.weights)])
        self.content = self.file.read_bytes()
        self.begin = rng.randrange(len(self.content))
        self.kind = rng.choice(list(KINDS))

    def apply(self) -> None:
        KINDS[self.kind](self)

    def flip(self) -> None:
        changed = bytearray(self.content)
        changed[self.begin] ^= 1 << self._rng.randrange(8)
        self.file.write_bytes(changed)

    def flip_of_seal(self) -> None:
        self._of_seal()
        self.flip()

    def truncate(self) -> None:
        self.file.write_bytes(self.content[: self.begin])

    def truncate_seal(self) -> None:
        self._of_seal()
        self.truncate()

    def extend(self) -> None:
        more = self._rng.choice([b"\n", bytes(64), self.content[-64:], self.content])
        self.file.write_bytes(self.content + more)

    def zero_block(self) -> None:
        begin = self.begin // SMALL_BLOCK_BYTES * SMALL_BLOCK_BYTES
        end = min(len(self.content), begin + SMALL_BLOCK_BYTES)
        self.file.write_bytes(self.content[:begin] + bytes(end - begin) + self.content[end:])

    def exchange_blocks(self) -> None:
        size = SMALL_BLOCK_BYTES
        a = self._rng.randrange(len(self.content) // size + 1) * size
        b = self._rng.randrange(len(self.content) // size + 1) * size
        changed = bytearray(self.content)
        first, second = self.content[a : a + size], self.content[b : b + size]
        changed[a : a + len(second)] = second
        changed[b : b + len(first)] = first
        self.file.write_bytes(changed)

    def repeat(self) -> None:
        length = self._rng.randint(1, 64)
        again = self.content[self.begin : self.begin + length]
        self.file.write_bytes(self.content[: self.begin] + again + self.content[self.begin :])

    def exchange_files(self) -> None:
        other = self._rng.choice(self.files)
        other_content = other.read_bytes()
        other.write_bytes(self.content)
        self.file.write_bytes(other_content)

    def copy_over(self) -> None:
        self.file.write_bytes(self._rng.choice(self.files).read_bytes())

    def copy_of_older(self) -> None:
        """A file of the folder before it was changed and sealed again; also its seal."""
        older = self.older / self.file.name
        if older.exists():
            shutil.copy(older, self.file)

    def rename(self) -> None:
        self.file.rename(self.file.with_name(f"x{self.file.name}"))

    def delete(self) -> None:
        self.file.unlink()

    def delete_seal(self) -> None:
        self._of_seal()
        self.file.unlink()

    def add(self) -> None:
        name = self._rng.choice(["x", "0", ".", "model-00009-of-00009"])
        (self.folder / f"{name}{self.file.name}").write_bytes(self.content)

    def add_folder(self) -> None:
        (self.folder / "new").mkdir()
        (self.folder / "new" / self.file.name).write_bytes(self.content)

    def link(self) -> None:
        """Another file takes the place of one, by a link."""
        other = self._rng.choice([*self.files, self.older / self.file.name])
        if other != self.file:
            self.file.unlink()
            self.file.symlink_to(other)

    def _of_seal(self) -> None:
        self.file = self.folder / seal_file.NAME
        self.content = self.file.read_bytes()
        self.begin = self._rng.randrange(len(self.content))


KINDS = {
    name: function
    for name, function in vars(Damage).items()
    if not name.startswith("_") and name != "apply"
}


def content_of(folder: Path) -> dict[str, bytes]:
    """All that a seal covers, and the seal."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    named = {path.relative_to(folder).as_posix(): path for path in paths}
    return {name: path.read_bytes() for name, path in named.items() if name[0] != "."}


# --- loads ----------------------------------------------------------------------------------------


def check_arrays(loaded: dict[str, Any]) -> None:
    for name, array in loaded.items():
        assert np.asarray(array).tobytes() == ARRAYS[name].tobytes(), name


def load_all(folder: Path, rng: random.Random) -> None:
    loaded = unickpt.load(unickpt.open(folder, hints={"sealed": True}))
    assert loaded.keys() == ARRAYS.keys()
    check_arrays(loaded)


def load_some(folder: Path, rng: random.Random) -> None:
    name = rng.choice(list(ARRAYS))
    checkpoint = unickpt.open(folder, hints={"sealed": True})
    loaded = unickpt.load(checkpoint, only=name)
    assert loaded.keys() == {name}
    check_arrays(loaded)


def load_part(folder: Path, rng: random.Random) -> None:
    row = rng.randrange(60)
    part = unickpt.open(folder, hints={"sealed": True})["a.weight"][row, 3:9]
    assert np.array_equal(part, ARRAYS["a.weight"][row, 3:9])


def load_file(folder: Path, rng: random.Random) -> None:
    files = [*folder.glob("*.safetensors"), *folder.glob("*.gguf")]
    file = rng.choice(sorted(files)) if files else folder / "model.safetensors"
    check_arrays(unickpt.load(unickpt.open(file, hints={"sealed": True})))


def load_engine(folder: Path, rng: random.Random) -> None:
    """As vLLM's loader fills a model."""
    import torch

    from unickpt.integrations.serving.loading import CheckpointLoader

    names = {name.replace(".", "_"): name for name in ARRAYS}
    model = torch.nn.Module()
    for short, name in names.items():
        empty = torch.full(ARRAYS[name].shape, -1, dtype=getattr(torch, ARRAYS[name].dtype.name))
        model.register_buffer(short, empty)

    def fill(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            model.get_buffer(name.replace(".", "_")).copy_(tensor)

    loader = CheckpointLoader({"hints": {"sealed": True}}, "x")
    loader.load(model, str(folder), must_fill=True, load_weights=fill)
    check_arrays({n: model.get_buffer(s).view(torch.uint8).numpy() for s, n in names.items()})


def load_without_hint(folder: Path, rng: random.Random) -> None:
    if not (folder / seal_file.NAME).exists():
        raise CheckpointCorrupt("this is not what is tested here")
    loaded = unickpt.load(folder)
    assert loaded.keys() == ARRAYS.keys()
    check_arrays(loaded)


LOADS = [load_all, load_some, load_part, load_file, load_engine, load_without_hint]


# --- the soak -------------------------------------------------------------------------------------


def is_noticed(call: Callable[[], object]) -> bool:
    """Whether a call raises one of unickpt's errors, or returns False."""
    try:
        return call() is False
    except UnickptError:
        return True


class SealSoak:
    """Damages folders, each in one way, and loads them.

    Arguments:
        folder: an empty folder.
        seed: of all damages.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self._rng = folder, random.Random(seed)
        self.damages, self.outcomes = Counter[str](), Counter[str]()

    def run(self, count: int) -> None:
        """Damages folders so many times."""
        done = 0
        while done < count:
            own = self._folder / str(done)
            self._rng.choice(MAKERS)(own)
            nbytes = self._rng.choice([SMALL_BLOCK_BYTES, seal_file.BLOCK_BYTES])
            with block_size(nbytes):
                self._seal_twice(own)
            for _ in range(min(50, count - done)):
                done += self._damage_once(own)
            shutil.rmtree(own)

    def _seal_twice(self, own: Path) -> None:
        """Seals a folder, changes it on purpose, and seals it again."""
        folder = own / "sealed"
        note = next(f for f in folder.iterdir() if f.suffix not in seal_file.FORMATS.values())
        sound = {f.name: f.read_bytes() for f in folder.iterdir()}
        for file in folder.iterdir():
            if file.suffix in seal_file.FORMATS.values():
                content = bytearray(file.read_bytes())
                content[-1] ^= 1
                file.write_bytes(content)
        note.write_bytes(note.read_bytes() + b"\n")
        seal(folder)
        shutil.copytree(folder, own / "older")
        for name, content in sound.items():
            (folder / name).write_bytes(content)
        seal(folder, overwrite=True)
        shutil.copytree(folder, own / "sound")

    def _damage_once(self, own: Path) -> bool:
        folder, sound = own / "sealed", content_of(own / "sound")
        damage = Damage(folder, own / "older", self._rng)
        damage.apply()
        is_damaged = content_of(folder) != sound
        if is_damaged:
            self.damages[damage.kind] += 1
            what = f"{damage.kind} of {damage.file.name} at {damage.begin}"
            assert is_noticed(lambda: check_seal(folder).ok), f"the seal still fits: {what}"
            hints = {"sealed": True}
            call = lambda: unickpt.verify(unickpt.open(folder, hints=hints)).ok  # noqa: E731
            self.outcomes["verify raised" if is_noticed(call) else "verify passed"] += 1
            for load in self._rng.sample(LOADS, 3):
                try:
                    load(folder, self._rng)
                except (CheckpointCorrupt, UnsupportedFormat) as error:
                    self.outcomes[f"{load.__name__}: {type(error).__name__}"] += 1
                except AssertionError as error:
                    raise AssertionError(f"{load.__name__} took {what}") from error
                else:
                    self.outcomes[f"{load.__name__}: equal"] += 1
        shutil.rmtree(folder)
        shutil.copytree(own / "sound", folder)
        return is_damaged


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--damages", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="unickpt-seal-") as folder:
        soak = SealSoak(Path(folder), asked.seed)
        soak.run(asked.damages)
    print(f"{asked.damages} damages, {time.monotonic() - started:.0f} s: 0 accepted")
    print(dict(sorted(soak.damages.items())))
    print(dict(sorted(soak.outcomes.items())))


if __name__ == "__main__":
    main()
