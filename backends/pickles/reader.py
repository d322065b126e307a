"""Plain pickles of containers, NumPy's and JAX's arrays, and plain values, read in place.

Nothing that a pickle names is imported or called.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from unickpt.backends._files import file_choice, known_objects
from unickpt.backends._files.file_choice import FoundFiles, open_kind
from unickpt.backends._files.pickles import Global, PickledObject
from unickpt.backends._files.torch_files import TorchFilesReader
from unickpt.backends._files.torch_pickles import TorchFile
from unickpt.backends._files.torch_tensors import holds_tensors
from unickpt.extend import Files, Reader, quoted

HINTS: Collection[str] = ()


def open(files: Files, hints: Mapping[str, Any]) -> Reader | None:
    """Opens a pickle; None if there is none.

    Raises:
        CheckpointCorrupt: it is damaged.
        UnsupportedFormat: it is one object that only its class can read, or several pickles.
        StorageError: the storage failed.
    """

    def make(selection: FoundFiles) -> Reader:
        file = TorchFile(files, selection.names[0])
        _check_no_object(files, file)
        return TorchFilesReader.of_files(files, {"": file}, "pickle")

    return open_kind(files, file_choice.PICKLE, make)


def _check_no_object(files: Files, file: TorchFile) -> None:
    """Checks that a pickle is more than one object that only its class can read."""
    root = file.value
    if isinstance(root, PickledObject):
        root = known_objects.decoded(root)
    if isinstance(root, PickledObject) and holds_tensors(root, set(), lambda n: None):
        return
    if isinstance(root, PickledObject | Global):
        raise files.unsupported(
            f"{file.name} is a pickle of one object, {quoted(root.name)}, which only its class "
            "can read; load it with pickle.load if you trust it, and save its arrays with "
            "unickpt.save or numpy.savez"
        )
