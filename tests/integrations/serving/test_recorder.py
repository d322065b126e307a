"""The recorder of a model's `load_weights`: what loaders do with a tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import unickpt
from unickpt.extend import Box
from unickpt.integrations.serving.recorder import LoadRecorder, WeightCopy, fragments_of

pytestmark = [pytest.mark.integration, pytest.mark.plugins]
STORED = {"a": np.arange(48, dtype=np.float32).reshape(8, 6), "b": np.arange(5, dtype=np.float32)}


class Recording:
    """A recorder of a checkpoint, with what it filled and read."""

    def __init__(self) -> None:
        self.path = "memory://test/recorder"
        unickpt.save(self.path, STORED, overwrite=True)
        self.fills, self.reads = list[Sequence[WeightCopy]](), list[str]()
        self.recorder = LoadRecorder(self.fill, self.read, {})

    def fill(self, copies: Sequence[WeightCopy]) -> None:
        self.fills.append(copies)
        for tree in fragments_of(copies):
            unickpt.load(self.path, tree, unexpected="skip", cast=True)

    def read(self, name: str) -> torch.Tensor:
        self.reads.append(name)
        return torch.from_numpy(STORED[name].copy())

    def run(self, load: Callable[..., Any]) -> Any:
        sources = {
            name: self.recorder.source(name, array.shape, torch.float32)
            for name, array in STORED.items()
        }
        with self.recorder:
            result = load(**sources)
            self.recorder.flush()
        return result


def rows(a: Any, b: Any) -> Any:
    out = torch.zeros(4, 6)
    out[:2].copy_(a.narrow(0, 6, 2))
    out.data[2:4] = a[1:3]
    return out


def columns(a: Any, b: Any) -> Any:
    return torch.nn.Parameter(torch.zeros(8, 2)).data.copy_(a[:, 3:5])


def transposed(a: Any, b: Any) -> Any:
    return torch.zeros(2, 8).copy_(a.t()[4:])


def without_an_axis(a: Any, b: Any) -> Any:
    out = torch.zeros(2, 6)
    out[0].copy_(a[5])
    out[1:, :3].copy_(a[7:8].chunk(2, 1)[1])
    return out


def cast_to_bf16(a: Any, b: Any) -> Any:
    return torch.zeros(8, 6, dtype=torch.bfloat16).copy_(a)


def twice_to_the_same(a: Any, b: Any) -> Any:
    return torch.zeros(5).copy_(a[0, :5]).copy_(b)


def fills_the_rest(a: Any, b: Any) -> Any:
    out = torch.ones(7)
    out[:5].copy_(b)
    out[5:].fill_(0)
    return out


def to_two_places(a: Any, b: Any) -> Any:
    out = torch.zeros(2, 5)
    out[0].copy_(b)
    out[1].copy_(b)
    return out


ONLY_COPIED = [rows, columns, transposed, without_an_axis, cast_to_bf16, twice_to_the_same]
ONLY_COPIED += [fills_the_rest, to_two_places]


@pytest.mark.parametrize("load", ONLY_COPIED)
def test_copies_read_only_their_boxes_at_the_end(load: Callable[..., Any]) -> None:
    recording = Recording()
    expected = load(**{name: torch.from_numpy(array) for name, array in STORED.items()})
    assert torch.equal(recording.run(load), expected)
    assert len(recording.fills) == 1
    assert not recording.reads
    assert not recording.recorder.computed
    if load is columns:
        assert [copy.box for copy in recording.recorder.copies] == [Box((0, 3), (8, 5))]


def computes(a: Any, b: Any) -> Any:
    return torch.zeros(2, 6).copy_(a[:2] * 2 + a[0].sum())


def asks_for_a_value(a: Any, b: Any) -> Any:
    return torch.zeros(3).fill_(b[4].item())


def changes_the_copy(a: Any, b: Any) -> Any:
    return torch.zeros(5).copy_(b).mul_(3)


def broadcasts(a: Any, b: Any) -> Any:
    return torch.zeros(3, 5).copy_(b)


def reshapes(a: Any, b: Any) -> Any:
    return torch.zeros(4, 12).copy_(a.view(4, 12))


def strides(a: Any, b: Any) -> Any:
    return torch.zeros(4, 6).copy_(a[::2])


def copies_bits(a: Any, b: Any) -> Any:
    return torch.zeros(8, 6, dtype=torch.int32).copy_(a.view(torch.int32))


def computes_with_bytes(a: Any, b: Any) -> Any:
    return a[2:].view(torch.uint8) >> 1


COMPUTED = [computes, asks_for_a_value, broadcasts, reshapes, strides]
COMPUTED += [copies_bits, computes_with_bytes]


@pytest.mark.parametrize("load", COMPUTED)
def test_all_else_reads_the_array(load: Callable[..., Any]) -> None:
    recording = Recording()
    expected = load(**{name: torch.from_numpy(array) for name, array in STORED.items()})
    assert torch.equal(recording.run(load), expected)
    assert set(recording.reads) == recording.recorder.computed != set()


def test_an_operation_on_a_parameter_first_executes_its_copy() -> None:
    recording = Recording()
    result = recording.run(changes_the_copy)
    assert torch.equal(result, torch.from_numpy(STORED["b"]) * 3)
    assert [len(copies) for copies in recording.fills] == [1]
