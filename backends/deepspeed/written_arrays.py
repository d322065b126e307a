"""The roles of a checkpoint's arrays in DeepSpeed's universal format: masters, slots of the
optimizer, steps, and untrained tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unickpt.backends.deepspeed.contents import OF_ENGINE
from unickpt.extend import Index, keys_of_leaves, quoted, tree_from_json

FP32, MODULE, STEP = "fp32", "module", "step"
OPTIMIZER, CLIENT = "optimizer", "client_state"
_ADAM = "exp_avg"
_OF_A_RANK = re.compile(r"@\d+$")
_EXPERTS = "deepspeed_experts."
_COMMON = "optimizer_state.pt"  # next to the folders of parameters


@dataclass(frozen=True)
class UniversalArrays:
    """The arrays of a checkpoint.

    Arguments:
        trained: by parameter, the names of its masters, `fp32`, and its slots, in the checkpoint.
        steps: by parameter, the name of its step.
        untrained: by name in the module, the names in the checkpoint of arrays without slots.
        implied: names in the checkpoint of arrays that follow from others: weights that are the
            masters, rounded.
        problems: one line each.
    """

    trained: Mapping[str, Mapping[str, str]]
    steps: Mapping[str, str]
    untrained: Mapping[str, str]
    implied: frozenset[str]
    problems: Sequence[str]

    @classmethod
    def of(cls, index: Index) -> UniversalArrays:
        """Finds them.

        Arguments:
            index: with the names under which unickpt reads DeepSpeed's checkpoints.
        """
        return _Finding(index).find_arrays()


@dataclass
class _Finding:
    index: Index
    problems: list[str] = field(default_factory=list)

    def find_arrays(self) -> UniversalArrays:
        named = self._named()
        weights, module, steps = (named.pop(top, {}) for top in (FP32, MODULE, STEP))
        slots = {slot: self._arrays_alone(named[slot]) for slot in named}
        owners = self._owners(weights, slots)
        self._check_known(weights, slots)
        self._check_known({n: n for n, owner in owners.items() if n == owner}, {STEP: steps})
        trained = {
            name: {FP32: leaf, **{s: leaves[owners[name]] for s, leaves in slots.items()}}
            for name, leaf in weights.items()
            if name in owners and all(owners[name] in leaves for leaves in slots.values())
        }
        self._check_complete(owners, slots)
        for name, of_slots in trained.items():
            self._check(name, of_slots)
        trained_steps = {name: steps[owners[name]] for name in trained if owners[name] in steps}
        self._check_steps(trained, trained_steps)
        masters = {self._array(module[name]) for name in trained if name in module}
        rounded = {n for n, leaf in module.items() if n in owners or self._array(leaf) in masters}
        untrained = {n: leaf for n, leaf in {**weights, **module}.items() if n not in owners}
        untrained = {n: leaf for n, leaf in untrained.items() if n not in rounded}
        implied = {module[name] for name in rounded}
        implied |= {weights[n] for n, leaf in untrained.items() if n in weights and n in module}
        written = {self._array(leaf) for leaves in trained.values() for leaf in leaves.values()}
        written |= {self._array(leaf) for leaf in untrained.values()}
        implied = {leaf for leaf in implied if self._array(leaf) not in written}
        return UniversalArrays(trained, trained_steps, untrained, frozenset(implied), self.problems)

    def _array(self, leaf: str) -> str:
        """The same for all names of an array."""
        return self.index.aliases.get(leaf, leaf)

    def _named(self) -> dict[str, dict[str, str]]:
        """The names of all but the engine's own values: by the first component, by the second."""
        leaves_by_slot: dict[str, dict[str, str]] = {}
        for leaf, keys in keys_of_leaves(tree_from_json(self.index.tree)):
            if keys and keys[0] in (*OF_ENGINE, OPTIMIZER, CLIENT):
                continue
            name = keys[1] if len(keys) == 2 else None
            if not isinstance(name, str) or not _is_folder(name):
                self.problems.append(f"{quoted(leaf)}, which is no <slot>/<parameter>")
            elif _OF_A_RANK.search(name):
                self.problems.append(
                    f"{quoted(leaf)}, the part of one tensor-parallel rank; hints say how ranks "
                    "share it (docs/formats/deepspeed.md)"
                )
            elif _EXPERTS in name and keys[0] != MODULE:
                self.problems.append(
                    f"{quoted(leaf)}, an expert: DeepSpeed would look for it by its number among "
                    "the experts of a rank"
                )
            else:
                leaves_by_slot.setdefault(str(keys[0]), {})[name] = leaf
        return leaves_by_slot

    def _arrays_alone(self, leaves: Mapping[str, str]) -> Mapping[str, str]:
        entries = self.index.entries
        for leaf in leaves.values():
            if leaf not in entries:
                self.problems.append(f"{quoted(leaf)}, a number: it has none but steps")
        return {name: leaf for name, leaf in leaves.items() if leaf in entries}

    def _check_known(
        self, weights: Mapping[str, str], slots: Mapping[str, Mapping[str, str]]
    ) -> None:
        for leaves in slots.values():
            unknown = [leaf for name, leaf in leaves.items() if name not in weights]
            self.problems += [
                f"{quoted(leaf)}, of no parameter that is trained" for leaf in unknown
            ]

    def _owners(
        self, weights: Mapping[str, str], slots: Mapping[str, Mapping[str, str]]
    ) -> dict[str, str]:
        """By each name of a parameter that is trained, the name that has its slots: of tied ones,
        optimizers know only one."""
        with_slots = [name for name in weights if any(name in leaves for leaves in slots.values())]
        arrays: dict[str, str] = {}
        for name in with_slots:
            arrays.setdefault(self._array(weights[name]), name)
        ties = {n: arrays[self._array(w)] for n, w in weights.items() if self._array(w) in arrays}
        return ties | {name: name for name in with_slots}

    def _check_complete(
        self, owners: Mapping[str, str], slots: Mapping[str, Mapping[str, str]]
    ) -> None:
        for slot, leaves in slots.items():
            missing = [name for name, owner in owners.items() if owner not in leaves]
            self.problems += [
                f"{slot}/{n} is missing, but the parameter has other slots" for n in missing
            ]
        if not owners:
            self.problems.append(
                f"there are no slots of an optimizer, such as {_ADAM}/<parameter>: for weights "
                'alone, to="hf" or "safetensors"'
            )

    def _check(self, name: str, slots: Mapping[str, str]) -> None:
        entries = self.index.entries
        masters = entries[slots[FP32]]
        for leaf in slots.values():
            entry = entries[leaf]
            if entry.dtype != "float32":
                self.problems.append(
                    f"{quoted(leaf)}: {entry.dtype_and_shape}, but DeepSpeed keeps float32; "
                    "write `as float32` into its rule"
                )
            elif entry.shape != masters.shape:
                self.problems.append(
                    f"{quoted(leaf)}: {entry.dtype_and_shape}, and {FP32}/{name} is "
                    f"{masters.dtype_and_shape}"
                )

    def _check_steps(self, trained: Mapping[str, Any], steps: Mapping[str, str]) -> None:
        is_adam = any(_ADAM in leaves for leaves in trained.values())
        for name in trained if steps or is_adam else ():
            if name not in steps:
                self.problems.append(f"{STEP}/{name} is missing, and the optimizer needs it")
                continue
            entry = self.index.entries.get(steps[name])
            value = self.index.values.get(steps[name])
            if entry is not None and (entry.dtype, entry.shape) != ("float32", ()):
                self.problems.append(
                    f"{quoted(entry.name)}: {entry.dtype_and_shape}, but torch counts steps in "
                    "float32[]; write `as float32` into its rule"
                )
            elif entry is None and type(value) not in (int, float):
                self.problems.append(f"{quoted(steps[name])}, which is no number")


def _is_folder(name: str) -> bool:
    """Whether the files of a parameter can be in a folder of its name."""
    return name not in ("", ".", "..", _COMMON) and not {"/", "\0"} & {*name}
