"""DeepSpeed's universal checkpoints whose descriptions of model and optimizer come from a template,
a universal checkpoint of the same model.

Source: deepspeed/checkpoint/{ds_to_universal,universal_checkpoint}.py.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unickpt.backends._files import torch_layout
from unickpt.backends._files.flat_names import cannot_hold
from unickpt.backends._files.torch_pickles import TorchFile
from unickpt.backends._files.torch_tensors import Tensor
from unickpt.backends.deepspeed.folder import LATEST_UNIVERSAL, states_in
from unickpt.extend import (
    Box,
    Files,
    Index,
    Plan,
    PlannedFile,
    name_component,
    quoted,
    resolve_path,
    text_file,
)

_COPIED = re.compile(r"[^/]*_model_states\.pt|zero/optimizer_state\.pt")
_WEIGHTS, _STEP, _PARAM = "fp32", "step", "param"
_HINT = (
    "arrays of a universal checkpoint are called fp32/<parameter>, exp_avg/<parameter> and so on, "
    "as in the template; give them these names by rules, and drop all others"
)


def plan(index: Index, template: str | os.PathLike[str]) -> Plan:
    """Plans the files.

    Arguments:
        index: of the checkpoint.
        template: a local folder.

    Raises:
        ValueError: that is no universal checkpoint.
        UnsupportedLeaf: the checkpoint does not fit it; says where.
    """
    files, tag = _opened(template)
    planned, problems = list[PlannedFile](), list[str]()
    arrays, values = dict[str, str](), dict[str, str]()
    states = states_in(files)
    for name, slots in states.items():
        if list(slots) == [_WEIGHTS]:  # buffers, frozen and tied parameters
            planned.append(_copy(files, slots[_WEIGHTS], tag))
            continue
        for slot_name, path in slots.items():
            leaf, slot = f"{slot_name}/{name_component(name)}", _slot(files, path)
            is_number = leaf in index.values and slot.shape == ()
            problem = "" if is_number else _problem(index, leaf, slot)
            if problem:
                problems.append(f"  {problem}")
                continue
            (values if is_number else arrays)[leaf] = leaf
            planned.append(_file(index, f"{tag}/{path}", leaf, slot))
    used = arrays.keys() | values.keys()
    unused = [name for name in index.names if name not in used]
    problems += [f"  {name!r}, {_why_not(name, states)}" for name in unused]
    if problems:
        raise cannot_hold("universal", problems, _HINT)
    planned += [_copy(files, path, tag) for path in files.names if _COPIED.fullmatch(path)]
    planned.append(text_file(LATEST_UNIVERSAL, tag, last=True))
    return Plan(tuple(planned), arrays, values, others=True)


def _opened(template: str | os.PathLike[str]) -> tuple[Files, str]:
    """The files of the template, and the name of its folder."""
    location = resolve_path(template)
    files = Files(location)
    if LATEST_UNIVERSAL in files.here:
        tag = files.text(LATEST_UNIVERSAL)
        if not re.fullmatch(r"[\w.-]+", tag):
            raise ValueError(
                f"template: {location}: {LATEST_UNIVERSAL} names the folder {quoted(tag)}"
            )
        files = Files(location.child(tag))
    if not files.exists("zero/optimizer_state.pt") or not files.location.is_local:
        raise ValueError(
            f"template: {location} is no local universal checkpoint; make one with DeepSpeed's "
            "ds_to_universal from any checkpoint of the model"
        )
    return files, str(files.location).rstrip("/").rpartition("/")[2]


def _copy(files: Files, path: str, tag: str) -> PlannedFile:
    return PlannedFile(f"{tag}/{path}", files.size(path) or 0, copied=f"{files.location}/{path}")


@dataclass(frozen=True)
class _TemplateSlot:
    """A file of the template.

    Arguments:
        shape: of its tensor; of a number ().
        dtype: of its tensor; None for a number.
        extras: other values of the file, such as how to split it; None if it is a tensor alone.
    """

    shape: tuple[int, ...]
    dtype: str | None
    extras: Mapping[str, Any] | None


def _slot(files: Files, path: str) -> _TemplateSlot:
    value = TorchFile(files, path).value
    extras = None
    if isinstance(value, dict):
        extras = {key: extra for key, extra in value.items() if key != _PARAM}
        value = value.get(_PARAM)
    if isinstance(value, int | float):
        return _TemplateSlot((), None, extras)
    if not isinstance(value, Tensor):
        raise ValueError(f"template: {files.location}/{path} contains no tensor")
    return _TemplateSlot(value.shape, value.dtype, extras)


def _problem(index: Index, leaf: str, slot: _TemplateSlot) -> str:
    """Why a leaf does not fit the template; empty if it does."""
    entry = index.entries.get(leaf)
    expected = f"{slot.dtype or 'a number'}{list(slot.shape)}"
    if entry is None:
        return f"{leaf!r} is missing; in the template it is {expected}"
    # DeepSpeed's plain ZeRO 3 stores parameters flat.
    flat = slot.shape == (math.prod(entry.shape),)
    same = entry.dtype == (slot.dtype or entry.dtype)
    if same and (entry.shape == slot.shape or flat):
        return ""
    return f"{leaf!r} is {entry.dtype_and_shape}; in the template it is {expected}"


def _why_not(leaf: str, states: Mapping[str, Mapping[str, str]]) -> str:
    """Why the template has no place for a leaf."""
    if leaf.startswith(f"{_STEP}/") and not any(_STEP in slots for slots in states.values()):
        return (
            "because DeepSpeed resumes all parameters from one step, the template's (in "
            "zero/optimizer_state.pt); drop it if the two are equal"
        )
    return "which is not trained in the template"


def _file(index: Index, path: str, leaf: str, slot: _TemplateSlot) -> PlannedFile:
    storages: dict[str, tuple[str, Box, int]] = {}
    value: Any = index.values.get(leaf)
    if leaf not in index.values:
        entry = index.entry(leaf)
        value = torch_layout.tensor(entry, slot.shape, "0")
        storages["0"] = (entry.name, Box.whole(entry.shape), entry.nbytes)
    if slot.extras is not None:
        value = {_PARAM: value, **slot.extras}
    return torch_layout.planned_file(path, value, storages, last=False)
