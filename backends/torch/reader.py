"""Files of torch.save, and Hugging Face folders of them, read in place.

Sources: torch/serialization.py, and transformers' `pytorch_model.bin.index.json`. Nothing that a
file names is imported or called.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from unickpt.backends._files import file_choice
from unickpt.backends._files.file_choice import FoundFiles, first_member, open_kind, weight_map
from unickpt.backends._files.torch_files import TorchFilesReader
from unickpt.backends._files.torch_pickles import TorchFile
from unickpt.backends._files.torch_tensors import Tensor
from unickpt.backends._files.zip_files import ZipFile
from unickpt.backends.torch import programs
from unickpt.extend import Files, Reader, quoted

HINTS: Collection[str] = ()


def open(files: Files, hints: Mapping[str, Any]) -> Reader | None:
    """Opens files of torch.save; None if there are none.

    Raises:
        CheckpointCorrupt: a file is damaged, or missing.
        UnsupportedFormat: it is an old kind of file, or there are several and no index.
        StorageError: the storage failed.
    """

    def make(selection: FoundFiles) -> Reader:
        if selection.index is None:
            return _open_single(files, selection.names[0])
        where = weight_map(files, selection.index, file_choice.TORCH.suffixes)
        return _open_sharded(files, where, selection.index)

    return open_kind(files, file_choice.TORCH, make)


# --- which files ----------------------------------------------------------------------------


def _open_single(files: Files, name: str) -> Reader:
    archive = None
    first = first_member(files.head(name))
    if first and not first.endswith(b"data.pkl"):
        archive = ZipFile(files, name)
        exported = programs.exported(archive)
        if exported is not None:
            return exported
    file = TorchFile(files, name, archive=archive)
    if file.program is not None:
        return programs.scripted(files, file, *file.program)
    return TorchFilesReader.of_files(files, {"": file}, "torch")


def _open_sharded(files: Files, where: Mapping[str, str], index: str) -> Reader:
    opened = {name: TorchFile(files, name) for name in sorted({*where.values()})}
    states = {name: x.value if isinstance(x.value, dict) else {} for name, x in opened.items()}
    unlisted = {  # arrays that an index lacks are shown
        name: file
        for file, state in states.items()
        for name, value in state.items()
        if isinstance(name, str) and name not in where and isinstance(value, Tensor)
    }
    listed = {**where, **unlisted}
    root = {name: states[file].get(name) for name, file in listed.items()}
    missing = [name for name, value in root.items() if not isinstance(value, Tensor)]
    if missing:
        raise files.damaged(
            f"{index} says that {quoted(missing[0])} is in {where[missing[0]]}, which does not "
            f"contain it; {len(missing)} missing in all"
        )
    by_file = {id(tensor): opened[listed[name]] for name, tensor in root.items()}
    return TorchFilesReader(files, root, by_file)
