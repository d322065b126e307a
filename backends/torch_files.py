"""Files of torch.save, and Hugging Face folders of them, read in place.

Sources: torch/serialization.py, and transformers' `pytorch_model.bin.index.json`. Nothing that a
file names is imported or called.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from unickpt.backends.hugging_face import weight_map
from unickpt.errors import CheckpointCorrupt, UnickptError, UnsupportedFormat
from unickpt.foreign.file_ranges import FileBox, RangeReader, whole
from unickpt.foreign.files import Files
from unickpt.foreign.pickles import Global, Opaque
from unickpt.foreign.torch_pickles import Tensor, TorchFile
from unickpt.format.index import ArrayEntry, Index
from unickpt.format.reader import Reader
from unickpt.quoting import quoted, shortened
from unickpt.storage.errors import Failed, reading_failed
from unickpt.trees import plain_values, tree

_SUFFIXES = (".pt", ".pth", ".bin")
_HF_FILE, _HF_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_ZIP = b"PK\x03\x04"
# A pickle of protocol 2 to 5 that begins with the magic number 0x1950a86a20f9469cfc6c.
_LEGACY = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
_TAR_AT, _TAR = 257, b"ustar"
_SCRIPT = "constants.pkl"
_MOST_TEXT = 1000
# A container that occurs several times in a pickle is several containers of the tree: their number
# can double with each level. So many nodes are always allowed, and one more for each byte.
_LEAST_NODES = 1000
# All their names together, for each byte.
_NAMES = 64


HINTS: Collection[str] = ()


def open(files: Files, hints: Mapping[str, Any]) -> Reader | None:
    """Opens a folder with files of torch.save; None if it contains none.

    Raises:
        CheckpointCorrupt: a file is damaged, or missing.
        UnsupportedFormat: it is an old kind of file, or there are several and no index.
        StorageError: the storage failed.
    """
    try:
        here = files.here
        if _HF_INDEX in here:
            return _open_sharded(files, weight_map(files, _HF_INDEX, _SUFFIXES))
        name = _single(files, here)
        return None if name is None else _open_single(files, name)
    except Failed as error:
        raise reading_failed(error, str(files.location)) from error


class TorchFilesReader(RangeReader):
    """Tensors and plain values of one or several files.

    Arguments:
        files: the folder.
        root: containers, plain values and tensors of `by_file`.
        by_file: the file of each tensor, by its identity as an object.
    """

    format = "torch"

    def __init__(self, files: Files, root: Any, by_file: Mapping[int, TorchFile]) -> None:
        try:
            node = tree.flatten(root, _is_leaf, lambda value, name: None)
        except UnickptError as error:
            raise UnsupportedFormat(f"{files.location}: {error}") from error
        entries, boxes = dict[str, ArrayEntry](), dict[str, tuple[FileBox]]()
        aliases, values = dict[str, str](), dict[str, plain_values.Plain]()
        first: dict[tuple[int, str], str] = {}
        for leaf in tree.leaves(node):
            if not isinstance(leaf.value, Tensor):
                values[leaf.name] = leaf.value
                continue
            file = by_file[id(leaf.value)]
            known = first.setdefault((id(file), leaf.value.identity), leaf.name)
            if known != leaf.name:
                aliases[leaf.name] = known
                continue
            where = _box(files, file, leaf)
            entries[leaf.name] = whole(leaf.name, leaf.value.shape, leaf.value.dtype, where)
            boxes[leaf.name] = (where,)
        index = Index(tree.to_json(node), entries, aliases=aliases, values=values)
        super().__init__(files, index, boxes)


def _box(files: Files, file: TorchFile, leaf: tree.Leaf) -> FileBox:
    try:
        return file.box(leaf.value)
    except (CheckpointCorrupt, Failed) as error:
        raise CheckpointCorrupt(f"{files.location}: array {leaf.name!r}: {error}") from error


# --- which files ----------------------------------------------------------------------------


def _single(files: Files, here: list[str]) -> str | None:
    """The file to read; None if no file can be one of torch's."""
    found = [name for name in here if name.endswith(_SUFFIXES)]
    if _HF_FILE in found:  # others beside it hold the state of a trainer
        return _HF_FILE
    ours = [name for name in found if not name.endswith(".bin") or _kind(files, name)]
    if len(ours) > 1:
        raise UnsupportedFormat(
            f"{files.location}: torch.save wrote several files, {shortened(', '.join(ours), 200)}, "
            f"and no {_HF_INDEX} says how they belong together; put one into a folder of its own"
        )
    return ours[0] if ours else None


def _kind(files: Files, name: str) -> str:
    """What a file is, by how it begins; empty if it is not known."""
    head = files.read(name, 0, 4) if _has(files, name, 4) else b""
    if head == _ZIP:
        return "zip"
    if head[:1] == b"\x80" and _has(files, name, 15) and files.read(name, 2, 13) == _LEGACY:
        return "a file of torch before 1.6, or with _use_new_zipfile_serialization=False"
    end = _TAR_AT + len(_TAR)
    if _has(files, name, end) and files.read(name, _TAR_AT, len(_TAR)) == _TAR:
        return "a tar file, as torch wrote them before 0.2"
    return ""


def _has(files: Files, name: str, count: int) -> bool:
    size = files.size(name)
    return len(files.tail(name, count)) == count if size is None else size >= count


def _open_file(files: Files, name: str) -> TorchFile:
    kind = _kind(files, name)
    if kind not in ("zip", ""):
        raise UnsupportedFormat(
            f"{files.location}: {name} is {kind}; load and save it with a later version of torch"
        )
    return TorchFile(files, name)


def _open_single(files: Files, name: str) -> Reader:
    file = _open_file(files, name)
    if any(member.rpartition("/")[2] == _SCRIPT for member in file.members):
        raise UnsupportedFormat(
            f"{files.location}: {name} is a program of torch.jit; save its state_dict() instead"
        )
    plain = PlainTree(f"{files.location}: {name}", file.pickle_size)
    root = plain.tree(file.value, 0, 0)
    return TorchFilesReader(files, root, dict.fromkeys(plain.tensors, file))


def _open_sharded(files: Files, where: Mapping[str, str]) -> Reader:
    opened = {name: _open_file(files, name) for name in sorted({*where.values()})}
    root: dict[str, Any] = {}
    by_file: dict[int, TorchFile] = {}
    missing = []
    for name, of in where.items():
        state = opened[of].value
        found = state.get(name) if isinstance(state, dict) else None
        if isinstance(found, Tensor):
            root[name] = found
            by_file[id(found)] = opened[of]
        else:
            missing.append(name)
    if missing:
        raise CheckpointCorrupt(
            f"{files.location}: {_HF_INDEX} says that {quoted(missing[0])} is in "
            f"{where[missing[0]]}, which does not contain it; {len(missing)} missing in all"
        )
    return TorchFilesReader(files, root, by_file)


# --- what a pickle holds, as a tree -----------------------------------------------------------


def _is_leaf(value: Any) -> bool:
    return isinstance(value, Tensor) or plain_values.is_plain(value)


class PlainTree:
    """Makes a tree of dicts, lists, tuples, plain values and tensors.

    Arguments:
        where: the file, for errors.
        size: bytes of its pickle.
    """

    def __init__(self, where: str, size: int) -> None:
        self.tensors: dict[int, Tensor] = {}
        self._where = where
        self._nodes = _LEAST_NODES + size
        self._letters = _NAMES * self._nodes

    def tree(self, found: Any, depth: int, letters: int) -> Any:
        """The tree of what was found.

        Arguments:
            found: what a pickle holds.
            depth: containers above it.
            letters: length of its name.
        """
        self._nodes -= 1
        self._letters -= letters
        if self._nodes < 0 or self._letters < 0:
            raise CheckpointCorrupt(f"{self._where} has too many leaves for its size")
        if depth > tree.MAX_DEPTH:
            raise UnsupportedFormat(f"{self._where} is nested deeper than {tree.MAX_DEPTH} levels")
        if isinstance(found, dict):
            return self._dict(found, depth, letters)
        if isinstance(found, list | tuple | set | frozenset):
            children = (self.tree(child, depth + 1, letters + 2) for child in found)
            return tuple(children) if isinstance(found, tuple) else list(children)
        if isinstance(found, Tensor):
            self.tensors[id(found)] = found
            return found
        return found if plain_values.is_plain(found) else _text(found)

    def _dict(self, found: dict[Any, Any], depth: int, letters: int) -> dict[Any, Any]:
        children: dict[Any, Any] = {}
        for key, value in found.items():
            name = _name(key)
            if name in children:
                raise UnsupportedFormat(f"{self._where}: two keys are both called {quoted(name)}")
            length = letters + 1 + (len(name) if isinstance(name, str) else 20)
            children[name] = self.tree(value, depth + 1, length)
        return children


def _name(key: Any) -> str | int:
    """A key of a dict as a name."""
    if type(key) is int:
        return key
    text = key if isinstance(key, str) else _text(key)
    return text.encode(errors="backslashreplace").decode()


def _text(found: Any) -> str:
    """What is neither an array nor a plain value, as a text for people."""
    if isinstance(found, Opaque | Global):
        return f"<{shortened(found.name, _MOST_TEXT)}>"
    if plain_values.is_plain(found) or isinstance(found, tuple):  # of a key, which is short
        return quoted(found, _MOST_TEXT)
    return f"<{type(found).__name__}>"
