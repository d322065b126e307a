"""What is known of saved arrays of JAX beyond their layouts, to restore them as they were."""

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
    """What is known of the arrays of a checkpoint of JAX.

    Arguments:
        numpy: the names of those that were arrays of NumPy; True if all were, None if it is not
            known.
        meshes: what is known of meshes.
    """

    numpy: Collection[str] | bool | None = None
    meshes: Mapping[MeshKey, MeshFacts] = field(default_factory=dict)

    @classmethod
    def of_json(cls, encoded_arrays: Mapping[str, Any]) -> SavedArrays:
        """From `to_json`, as it is stored in the metadata of a checkpoint; of what has another form
        nothing is known."""
        numpy, meshes = encoded_arrays.get("numpy"), encoded_arrays.get("meshes", ())
        try:
            return cls(
                frozenset(numpy) if isinstance(numpy, list) else numpy,
                {(tuple(m["axes"]), tuple(m["shape"])): (m["types"], m["devices"]) for m in meshes},
            )
        except (KeyError, TypeError):  # the metadata are a user's, by chance
            return cls()

    def to_json(self) -> dict[str, Any]:
        """For `of_json`."""
        numpy = self.numpy
        return {
            "numpy": numpy if isinstance(numpy, bool | None) else sorted(numpy),
            "meshes": [
                {"axes": [*axes], "shape": [*shape], "types": [*types], "devices": [*ids]}
                for (axes, shape), (types, ids) in self.meshes.items()
            ],
        }

    def is_numpy(self, name: str) -> bool | None:
        """Whether an array was one of NumPy; None if that is not known."""
        return self.numpy if isinstance(self.numpy, bool | None) else name in self.numpy

    def of_mesh(self, axes: Sequence[str], shape: Sequence[int]) -> MeshFacts:
        """What is known of a mesh."""
        return self.meshes.get((tuple(axes), tuple(shape)), ((), ()))
