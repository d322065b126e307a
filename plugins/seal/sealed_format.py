"""Opens sealed folders as the format that they have, and checks them."""

from __future__ import annotations

import errno
from collections.abc import Collection, Mapping
from typing import Any

from unickpt.errors import HintError
from unickpt.extend import Damaged, Files, Reader, first_few, format_named, quoted
from unickpt.plugins.seal.seal_file import NAME, SealedFiles, decode

HINTS: Collection[str] = ("dequantize", "sealed")


def open(files: Files, hints: Mapping[str, Any]) -> Reader | None:
    """Opens a sealed folder, or a file in it; None if there is no seal.

    Arguments:
        files: of the folder.
        hints: those of its format; and `sealed`, which requires a seal: True, or its digest.

    Raises:
        CheckpointCorrupt: a file differs from what was sealed, is missing, or was added; or the
            required seal is not there.
        HintError: the format takes no such hint.
        StorageError: the storage failed.
    """
    sealed_files = open_sealed(files)
    required = hints.get("sealed", False)
    if not isinstance(required, bool | str):
        raise HintError(f"sealed={required!r} is neither True nor the digest of a seal")
    if sealed_files is None:
        if required is not False:
            raise files.damaged(f"{NAME} is missing, which the hint `sealed` requires")
        return None
    if isinstance(required, str) and required != sealed_files.seal.digest:
        raise files.damaged(
            f"{NAME} has the digest {sealed_files.seal.digest}, and the hint `sealed` requires "
            f"{quoted(required)}: the folder was sealed again"
        )
    problems = sealed_files.problems(is_full=False)
    if problems:
        raise files.damaged(f"{first_few(problems)}. It was sealed; see {NAME}")
    hints = {name: value for name, value in hints.items() if name != "sealed"}
    format = format_named(sealed_files.seal.format)
    for name in hints.keys() - set(format.HINTS):
        raise HintError(
            f"{files.location} is of the format {sealed_files.seal.format!r}, without {name}"
        )
    reader: Reader | None = format.open(sealed_files, hints)
    if reader is not None:  # damage in none of its arrays goes unnoticed
        reader.unchecked = tuple  # type: ignore[method-assign]
    return reader


def open_sealed(files: Files) -> SealedFiles | None:
    """The files of a sealed folder; None if there is no seal.

    Raises:
        CheckpointCorrupt: the seal is damaged.
    """
    if files.single is None and NAME not in files.here:
        return None
    try:
        content = files.whole(NAME)
    except Damaged as error:
        if files.single is None or error.errno != errno.ENOENT:
            raise
        return None
    return SealedFiles(files, decode(content, files))
