"""Facts about a live optimizer of Megatron that a save needs: the tensors that its steps change,
and the positions of parameters in the flat buckets of a distributed one (dp_reshardable)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import (
    extract_sharded_base,
    extract_sharded_tensors_and_factories,
)

from unickpt.errors import UnsupportedLeaf
from unickpt.extend import row_major
from unickpt.integrations.megatron.pieces import (
    Strided,
    TensorPiece,
    flat_pieces,
    is_main,
    plain_tensor,
)

_BUCKET = re.compile(
    r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_\d+"
    r"\.gbuf_idx_(\d+)\.dtype_.*\.bucket_idx_(\d+)\.(\w+)"
)
_OF_GROUP = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.(\w+)")
_GROUP = re.compile(r"\.dp_group_idx_\d+\.")
_NEEDED = (
    "the state of the distributed optimizer is in flat buckets (dp_reshardable), and only the "
    "optimizer knows where its parameters are in them: pass optimizer=, as in "
    "{strategy}(optimizer=optimizer), or save with --dist-ckpt-optim-fully-reshardable"
)
_GROUPS = ("model_float16_groups", "model_fp32_groups", "float16_groups", "fp32_from_fp32_groups")


def is_bucket(key: str) -> bool:
    """Whether a key is that of a part of a flat bucket.

    Example:
        >>> is_bucket("optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_x.bucket_idx_1.param")
        True
    """
    return _BUCKET.fullmatch(key) is not None


def is_of_group(key: str) -> bool:
    """Whether a key is that of an object of one data-parallel group's optimizer.

    Example:
        >>> is_of_group("optimizer.distributed.dp_group_idx_0.optimizer")
        True
    """
    return _OF_GROUP.fullmatch(key) is not None


def is_geometry(key: str) -> bool:
    """Whether a key is that of the sizes of buckets, which say nothing of the state."""
    match = _OF_GROUP.fullmatch(key)
    return match is not None and match[1].startswith("per_bucket_numel")


def same_object(key: str, other: str) -> bool:
    """Whether two keys differ only in the data-parallel group.

    Example:
        >>> same_object("optimizer.distributed.dp_group_idx_0.optimizer",
        ...             "optimizer.distributed.dp_group_idx_7.optimizer")
        True
    """
    return _GROUP.sub(".", key) == _GROUP.sub(".", other)


def parts_of(optimizer: Any) -> list[Any]:
    """The optimizers of a chain of Megatron's; of any other, itself."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def inner_optimizers(optimizer: Any) -> list[Any]:
    """The optimizers of torch that make the steps."""
    optimizers = [getattr(part, "optimizer", part) for part in parts_of(optimizer)]
    return [inner for inner in optimizers if inner is not None]


def model_parameters(optimizer: Any) -> Iterator[torch.Tensor]:
    """The model's parameters that its steps change."""
    for part in parts_of(optimizer):
        for name in _GROUPS:
            for group in getattr(part, name, None) or ():
                yield from (tensor for tensor in group if isinstance(tensor, torch.Tensor))
        inner = getattr(part, "optimizer", part)
        for group in getattr(inner, "param_groups", ()):
            yield from group["params"]


@dataclass(frozen=True)
class _Held:
    """The elements of a parameter whose state this rank has.

    Arguments:
        parameter: the model's.
        first, after: of the flattened parameter.
    """

    parameter: torch.Tensor
    first: int
    after: int


class Buckets:
    """Where the parameters are in an optimizer's buckets, and in the model.

    Arguments:
        optimizer: None if it is not known; then a bucket is an error.
        metadata: as the job gives it to the model's `sharded_state_dict`.
        strategy: the name of the class that needs it, for errors.
    """

    def __init__(self, optimizer: Any, metadata: Mapping[str, Any] | None, strategy: str) -> None:
        self._optimizer, self._metadata, self._strategy = optimizer, metadata, strategy
        self._in_model: dict[int, Any] | None = None
        self._slots: dict[tuple[int, int, int], dict[int, _Held]] | None = None

    def pieces(self, sharded: Any) -> list[tuple[TensorPiece, bool]]:
        """The boxes of the parameters' state in one `ShardedTensor` of a bucket; none of padding.

        Returns:
            With each, whether it is this replica that is saved.

        Raises:
            UnsupportedLeaf: they cannot be determined.
        """
        match = _BUCKET.fullmatch(sharded.key)
        assert match is not None, "it is a bucket"
        if self._optimizer is None:
            needed = _NEEDED.format(strategy=self._strategy)
            raise UnsupportedLeaf(f"{sharded.key!r}: {needed}")
        number, buffer, bucket, slot = match.groups()
        bucket_key = int(number or 0), int(buffer), int(bucket)
        data, flat = plain_tensor(sharded.data, sharded.key), sharded.flattened_range
        start = int(sharded.global_offset[0]) + (0 if flat is None else flat.start)
        elements = self._elements_in_buckets().get(bucket_key, {}).get(start)
        if elements is None:
            return []
        if elements.after - elements.first != data.numel():
            raise UnsupportedLeaf(
                f"{sharded.key!r}: the optimizer holds {elements.after - elements.first} elements "
                f"of a parameter there, but {data.numel()} are given; is optimizer= the one that "
                "made this state?"
            )
        part = elements.first, elements.after
        pieces = []
        for inner, where in self._whole(elements.parameter):
            named = replace(inner, key=f"optimizer.state.{slot}.{inner.key}")
            saved = is_main(sharded.replica_id) and is_main(_without_data(inner.replica_id))
            pieces += [(piece, saved) for piece in flat_pieces(named, data, part, where)]
        return pieces

    def metadata(self) -> dict[str, Any]:
        """The state that this rank's optimizer requests by the keys of its buckets, without
        data."""
        if not any(hasattr(part, "gbuf_ranges") for part in parts_of(self._optimizer)):
            return {}
        kind = {"distrib_optim_sharding_type": "dp_reshardable"}
        sharded_state, _ = extract_sharded_base(
            self._optimizer.sharded_state_dict({}, is_loading=True, metadata=kind)
        )
        return {x.key: x.without_data() for x in nested_values(sharded_state)}

    def _elements_in_buckets(self) -> dict[tuple[int, int, int], dict[int, _Held]]:
        """The positions: by optimizer, buffer and bucket, then by the position in the bucket."""
        if self._slots is None:
            self._slots = {}
            for number, part in enumerate(parts_of(self._optimizer)):
                for buffer, ranges in enumerate(getattr(part, "gbuf_ranges", ())):
                    buckets = (bucket for of_dtype in ranges.values() for bucket in of_dtype)
                    for index, bucket in enumerate(buckets):
                        slots = self._slots.setdefault((number, buffer, index), {})
                        for parameter, where in bucket["param_map"].items():
                            part = _Held(parameter, where["param"].start, where["param"].end)
                            slots[where["gbuf_world_in_bucket"].start] = part
        return self._slots

    def _whole(self, parameter: torch.Tensor) -> Iterable[tuple[Any, Strided]]:
        """The `ShardedTensor`s that a parameter is in the model, and where their elements are in
        it."""
        if self._in_model is None:
            self._in_model = {id(x.data): x for x in self._of_model()}
        sharded = self._in_model.get(id(parameter))
        if sharded is None:
            raise UnsupportedLeaf(
                f"a parameter of shape {list(parameter.shape)} of the optimizer is not in the "
                "sharded_state_dict of its model; pass metadata= if the job passes one to "
                "model.sharded_state_dict"
            )
        if isinstance(sharded, ShardedTensor):
            return [(sharded, Strided(row_major(sharded.local_shape)))]
        # A tensor without memory shows which elements the factory takes, and in which order.
        like = torch.empty(tuple(parameter.shape), dtype=parameter.dtype, device="meta")
        parts = list(nested_values({"": replace(sharded, data=like).build()}))
        if not all(_is_view(part.data, like) for part in parts):
            raise UnsupportedLeaf(
                f"{sharded.key!r}: its ShardedTensorFactory copies elements, so it is not known "
                "which of the optimizer's belong where; save with "
                "--dist-ckpt-optim-fully-reshardable"
            )
        return [(x, Strided(x.data.stride(), x.data.storage_offset())) for x in parts]

    def _of_model(self) -> Iterator[Any]:
        parts = parts_of(self._optimizer)
        chunks = {id(x): x for part in parts for x in getattr(part, "model_chunks", ())}
        for chunk in chunks.values():
            while hasattr(chunk, "module"):
                chunk = chunk.module
            metadata = None if self._metadata is None else dict(self._metadata)
            tensors, _ = extract_sharded_tensors_and_factories(
                chunk.sharded_state_dict(metadata=metadata)
            )
            for value in nested_values(tensors):
                if isinstance(value, ShardedTensor | ShardedTensorFactory):
                    yield value


def _without_data(replica_id: Any) -> Any:
    """A replica's number, but for that among the data-parallel ranks, which share the buckets."""
    if isinstance(replica_id, int):
        return 0
    return tuple(replica_id[:-1])


def _is_view(tensor: torch.Tensor, base: torch.Tensor) -> bool:
    return bool(tensor.untyped_storage()._cdata == base.untyped_storage()._cdata)
