"""A model's own `load_weights`, fed from any checkpoint."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

import unickpt
from unickpt import Checkpoint, LoadOptions, Rules
from unickpt.errors import LoadMismatch
from unickpt.extend import OcdbtReader, convertible, first_few
from unickpt.integrations.serving.recorder import LoadRecorder, WeightCopy, fragments_of

_MODEL = "model/"


class CheckpointLoader:
    """Fills models from a checkpoint; writes nothing.

    Arguments:
        settings: `path`, the checkpoint; `rules`, from stored names to those of Hugging Face: a
            preset's name, a file, or text; `sizes` for them, as for `Rules.preset`; `under`, the
            part of the checkpoint, as for `unickpt.load`; `hints`, as for `unickpt.open`; and
            `verify`, as in `LoadOptions`. All are optional. Of a training state, stored or made by
            rules, `model` is loaded.
        option: has the settings, for errors.

    Raises:
        ValueError: there are other settings.
        TypeError: `verify` is not True or False.
    """

    def __init__(self, settings: Mapping[str, Any] | None, option: str) -> None:
        options = dict(settings or {})
        self._path = options.pop("path", None)
        self._rules = rules_named(options.pop("rules", None), options.pop("sizes", None))
        self._under, self._hints = options.pop("under", ""), options.pop("hints", None)
        self._options = LoadOptions(verify=options.pop("verify", True))
        if options:
            raise ValueError(
                f"{option} has {', '.join(sorted(options))}; it takes path, rules, sizes, under, "
                "hints and verify"
            )

    def load(
        self,
        model: Any,
        default_path: str,
        *,
        must_fill: bool,
        load_weights: Callable[[Iterator[tuple[str, torch.Tensor]]], Any] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> LoadRecorder:
        """Fills the parameters of a model by its `load_weights`.

        Arguments:
            model: of vLLM or SGLang.
            default_path: the checkpoint, if the settings name none.
            must_fill: whether all elements of all parameters must be loaded.
            load_weights: instead of the model's own; it may return the names that it loaded.
            group: ranks that all load a part of the model. A compressed or remote chunk that
                several need is read by one.

        Returns:
            What was copied where.

        Raises:
            LoadMismatch: the checkpoint lacks a parameter, or a part of one.
            UnickptError: as `unickpt.load`.
        """
        checkpoint = unickpt.open(self._path or default_path, hints=self._hints)
        if self._under:
            checkpoint = checkpoint.under(self._under)
        source = _Source(checkpoint, self._rules, self._options)
        recorder = LoadRecorder(source.fill, source.read, dict(model.named_parameters()))
        tensors = [
            (name, recorder.source(name, array.shape, array.dtype))
            for name, array in source.arrays.items()
        ]
        group = group if _is_worth_sharing(checkpoint) else None
        try:
            with recorder:
                loaded = (load_weights or model.load_weights)(iter(tensors))
        except Exception:
            _do_all(group, False)  # the others wait for this rank
            raise
        if _do_all(group, recorder.is_pending):
            source.group = group
        # Not within it: the load itself has operations of torch, too. Nor on a thread meanwhile:
        # with a first part read so, the whole took 1.2 to 1.7 times as long.
        recorder.flush()
        if must_fill:
            missing = set(recorder.filled.incomplete())
            if loaded is not None:
                missing |= {name for name, _ in model.named_parameters()} - set(loaded)
            if missing:
                raise LoadMismatch(
                    f"{checkpoint.url} does not fill {first_few(sorted(missing))} of "
                    f"{type(model).__name__}, or only in part; its arrays must have Hugging Face's "
                    "names, maybe through `rules`"
                )
        return recorder


class _Source:
    """A checkpoint through rules.

    Arguments:
        checkpoint: the checkpoint.
        rules: to the names that `load_weights` gets.
        options: of each load.
    """

    def __init__(self, checkpoint: Checkpoint, rules: Rules | None, options: LoadOptions) -> None:
        self._checkpoint, self._rules, self._options = checkpoint, rules, options
        entries = convertible(checkpoint.reader, rules, None).index.entries
        has_model = any(name.startswith(_MODEL) for name in entries)
        self._above = _MODEL if has_model else ""
        named = {n.removeprefix(self._above): n for n in entries if n.startswith(self._above)}
        self.arrays = {
            short: torch.empty(
                entries[name].shape, dtype=getattr(torch, entries[name].dtype), device="meta"
            )
            for short, name in named.items()
            if "/" not in short
        }
        """All arrays, without data."""
        self.group: dist.ProcessGroup | None = None
        """The ranks that call `fill` next, and read together then."""

    def fill(self, copies: Sequence[WeightCopy]) -> None:
        """Reads what is copied."""
        for tree in fragments_of(copies):
            group, self.group = self.group, None
            self._load(tree, group)

    def read(self, name: str) -> torch.Tensor:
        """Reads an array whole."""
        whole = torch.empty_like(self.arrays[name], device="cpu")
        self._load({name: whole})
        return whole

    def _load(self, tree: Mapping[str, Any], group: dist.ProcessGroup | None = None) -> None:
        """Fills a part of the arrays; rules see that all are wanted."""
        options = self._options
        if group is not None:
            options = dataclasses.replace(options, exchange=True, group=group)
        like: dict[str, Any] = {**self.arrays, **tree}
        only = None
        if self.arrays.keys() != tree.keys():
            only = [self._above + name for name in tree]
        if self._above:
            like = {self._above.rstrip("/"): like}
        unickpt.load(
            self._checkpoint, like, rules=self._rules, only=only, unexpected="skip", cast=True,
            options=options,
        )  # fmt: skip


def _is_worth_sharing(checkpoint: Checkpoint) -> bool:
    """Whether ranks that need parts of a chunk had better have one read it. unickpt's own chunks
    are read from this machine's cache in a third of the time that sending them takes."""
    reader = checkpoint.reader
    is_cheap = isinstance(reader, OcdbtReader) and not reader.location.is_remote
    return not (is_cheap or all(map(reader.reads_boxes, reader.index.arrays.values())))


def _do_all(group: dist.ProcessGroup | None, does: bool) -> bool:
    """Whether all ranks of a group do it; all call this."""
    if group is None or group.size() == 1:
        return False
    answers = [False] * group.size()
    dist.all_gather_object(answers, does, group=group)
    return all(answers)


def rules_named(rules: str | None, sizes: Mapping[str, int] | None = None) -> Rules | None:
    """Rules from settings: the name of a preset, a file, or text."""
    if rules is None:
        return None
    if rules in Rules.presets():
        return Rules.preset(rules, sizes=sizes)
    if os.path.isfile(rules):
        return Rules.load(rules, sizes=sizes)
    return Rules.parse(rules, sizes=sizes)
