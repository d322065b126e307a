"""Facts about saved arrays of JAX beyond their layouts, to restore them exactly."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MeshKey = tuple[tuple[str, ...], tuple[int, ...]]
"""The axes of a mesh, and its shape."""
MeshFacts = tuple[Sequence[str], Sequence[int]]
"""The types of the axes of a mesh, as JAX writes them, and the ids of its devices, row-major; none
if they are not known."""


@dataclass(frozen=True)
class SavedArrays:
    """Facts about the arrays of a checkpoint of JAX.

    Arguments:
        numpy: the names of those that were arrays of NumPy; True if all were, None if unknown.
        meshes: the facts about meshes.
    """

    numpy: Collection[str] | bool | None = None
    meshes: Mapping[MeshKey, MeshFacts] = field(default_factory=dict)

    @classmethod
    def of_json(cls, encoded_arrays: Mapping[str, Any]) -> SavedArrays:
        """Decodes the result of `to_json` in the metadata of a checkpoint; anything of another form
        counts as unknown."""
        numpy, meshes = encoded_arrays.get("numpy"), encoded_arrays.get("meshes", ())
        try:
            return cls(
                frozenset(numpy) if isinstance(numpy, list) else numpy,
                {(tuple(m["axes"]), tuple(m["shape"])): (m["types"], m["devices"]) for m in meshes},
            )
        except (KeyError, TypeError):  # a user's metadata under the same key
            return cls()

    def to_json(self) -> dict[str, Any]:
        """Encodes the facts for `of_json`."""
        numpy = self.numpy
        return {
            "numpy": numpy if isinstance(numpy, bool | None) else sorted(numpy),
            "meshes": [
                {"axes": [*axes], "shape": [*shape], "types": [*types], "devices": [*ids]}
                for (axes, shape), (types, ids) in self.meshes.items()
            ],
        }

    def is_numpy(self, name: str) -> bool | None:
        """Whether an array was one of NumPy; None if unknown."""
        return self.numpy if isinstance(self.numpy, bool | None) else name in self.numpy

    def of_mesh(self, axes: Sequence[str], shape: Sequence[int]) -> MeshFacts:
        """The facts about a mesh."""
        return self.meshes.get((tuple(axes), tuple(shape)), ((), ()))
