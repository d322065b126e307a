"""Rules pushed down to shards: each process reads what its part needs, and every bit is right."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support import TESTS
from support.counts import ChunkRead
from support.processes import Processes

import unickpt
from unickpt import Rules, SaveOptions

# A stacked left side, and a right side of single layers whose axes are split, merged and turned.
RULES = """
    q   [l e h (pair half)] <-> layers.{l}.q [(h half pair) e]    half=2
    qkv [l e (a + b)]       <-> layers.{l}.a [a e], layers.{l}.b [b e]
    mlp [l e f]             <-> layers.{l}.mlp [e f]
"""
L, E, H, D, A, B, F = 4, 48, 3, 16, 40, 24, 80


def left() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"q": (L, E, H, D), "qkv": (L, E, A + B), "mlp": (L, E, F)}
    return {name: rng.random(shape, np.float32) for name, shape in shapes.items()}


def right(stored: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the rules should make, by NumPy."""
    made = {}
    for i in range(L):
        q = stored["q"][i].reshape(E, H, D // 2, 2).transpose(1, 3, 2, 0)
        made[f"layers.{i}.q"] = q.reshape(H * D, E)
        made[f"layers.{i}.a"] = stored["qkv"][i, :, :A].T
        made[f"layers.{i}.b"] = stored["qkv"][i, :, A:].T
        made[f"layers.{i}.mlp"] = stored["mlp"][i]
    return made


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    unickpt.save(tmp_path / "left", left(), options=SaveOptions(chunk_bytes=4 * E, fsync=False))
    return tmp_path / "left"


SPECS = [P("x"), P(None, "x"), P("x", "y"), P(("y", "x")), P("y"), P()]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_onto_a_mesh_of_jax(spec: P, stored: Path) -> None:
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("x", "y"))
    sharding = NamedSharding(mesh, spec)
    expected = right(left())
    like = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        for name, x in expected.items()
    }
    made = unickpt.load(stored, like, rules=Rules.parse(RULES))
    for name, x in expected.items():
        assert made[name].sharding == sharding
        assert np.array_equal(made[name], x), name


@pytest.mark.parametrize("spec", [P(None, "x"), P("y", "x"), P(None, ("y", "x")), P("x")], ids=str)
def test_back_onto_a_mesh_of_jax(spec: P, stored: Path, tmp_path: Path) -> None:
    """Layers are stacked again, each shard out of the layers that it holds."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("x", "y"))
    unickpt.save(tmp_path / "right", right(left()), options=SaveOptions(chunk_bytes=500))
    like = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
        for name, x in left().items()
    }
    made = unickpt.load(tmp_path / "right", like, rules=Rules.parse(RULES).inverse)
    assert all(np.array_equal(made[name], x) for name, x in left().items())


@pytest.mark.parametrize("dim", [0, 1])
def test_one_of_eight_shards_reads_about_an_eighth(
    dim: int, stored: Path, chunk_reads: list[ChunkRead]
) -> None:
    """The stored rows are rows of `e`: shards of that axis need an eighth; those of the other one
    need a part of each row, and chunks are as long as a row of the smallest array."""
    expected = right(left())
    like = {}
    for name, x in expected.items():
        size = x.shape[dim] // 8
        start = [size * 3 if d == dim else 0 for d in range(2)]
        stop = [size * 4 if d == dim else n for d, n in enumerate(x.shape)]
        box = unickpt.types.Box(tuple(start), tuple(stop))
        like[name] = unickpt.types.LocalFragments(x.shape, [(box, np.empty(box.shape, x.dtype))])
    unickpt.load(stored, like, rules=Rules.parse(RULES))
    for name, x in expected.items():
        ((box, data),) = like[name].fragments
        assert np.array_equal(data, x[box.slices]), name
    whole = sum(x.nbytes for x in expected.values())
    by_e = {name: (x.shape[dim] == E) for name, x in expected.items()}
    bound = whole / 8 if all(by_e.values()) else whole
    read = sum(chunk.nbytes for chunk in chunk_reads)
    assert read <= 1.05 * bound
    # Each needed chunk was read once: an independent look at which elements are needed.
    needed = 0
    checkpoint = unickpt.open(stored)
    for source, array in checkpoint.items():
        for part in array.parts:
            for number in range(part.count):
                chunk = part.chunk_box(number)
                if _needs(source, chunk, dim):
                    needed += chunk.size * 4
    assert read == needed


def _needs(source: str, chunk: unickpt.types.Box, dim: int) -> bool:
    """Whether an element of a chunk goes into the fourth of eight shards of what it makes."""
    marks = {name: np.zeros(x.shape, np.float32) for name, x in left().items()}
    marks[source][chunk.slices] = 1
    for x in right(marks).values():
        size = x.shape[dim] // 8
        if x[size * 3 : size * 4].any() if dim == 0 else x[:, size * 3 : size * 4].any():
            return True
    return False


def test_dtensors_on_four_ranks(stored: Path, processes: Processes, tmp_path: Path) -> None:
    """Uneven shards along both dimensions of a mesh, meta tensors, and only what a rank needs."""
    (tmp_path / "rules").write_text(RULES)
    np.savez(tmp_path / "expected.npz", **right(left()))
    source = """
        import json, sys
        import numpy as np, torch, torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, empty
        import unickpt

        tests, stored, rules, expected = sys.argv[1:]
        sys.path.insert(0, tests)
        from support.counts import chunks_read
        dist.init_process_group("gloo")
        expected = np.load(expected)
        rules = unickpt.Rules.load(rules)
        told = []
        rows, columns = Shard(0), Shard(1)
        layouts = [
            ((4,), [columns]), ((4,), [rows]), ((2, 2), [rows, columns]), ((2, 2), [columns, rows]),
            ((2, 2), [columns, Replicate()]), ((4, 1), [rows, rows]),
        ]
        for shape, placements in layouts:
            mesh = init_device_mesh("cpu", shape)
            with torch.device("meta" if len(shape) == 2 else "cpu"):
                like = {
                    n: empty(*x.shape, device_mesh=mesh, placements=placements)
                    for n, x in expected.items()
                }
            with chunks_read() as seen:
                made = unickpt.load(stored, like, rules=rules)
            whole = sum(x.nbytes for x in expected.values())
            whole_made = {n: made[n].full_tensor().numpy() for n in expected}
            right = all(np.array_equal(whole_made[n], expected[n]) for n in expected)
            told.append([right, sum(chunk.nbytes for chunk in seen) / whole])
        print(json.dumps(told))
        dist.destroy_process_group()
    """
    arguments = TESTS, stored, tmp_path / "rules", tmp_path / "expected.npz"
    jobs = processes.torch(4, textwrap.dedent(source), *arguments)
    for out in processes.finish(jobs):
        told = json.loads(out.splitlines()[-1])
        assert all(right for right, _ in told), told
        by_columns = told[0][1]  # `e`, along which chunks are cut
        assert by_columns < 0.5, told


def test_a_chunk_lands_where_it_belongs_without_a_copy(
    stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is only renamed, stacked or unstacked is read straight into place."""
    from unickpt.reading import read_plan

    placed: list[str] = []
    place = read_plan.place
    monkeypatch.setattr(
        read_plan, "place", lambda *a: (placed.append(a[2].entry.name), place(*a))[1]
    )
    like = {f"layers.{i}.mlp": np.empty((E, F), np.float32) for i in range(L)}
    rules = Rules.parse("mlp [l e f] <-> layers.{l}.mlp [e f]\nq <-> drop\nqkv <-> drop")
    unickpt.load(stored, like, rules=rules)
    assert placed == []
    assert all(np.array_equal(like[f"layers.{i}.mlp"], left()["mlp"][i]) for i in range(L))
