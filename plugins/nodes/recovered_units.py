"""Units that are lost with a node, such as experts: a step takes them from its copy in the root,
where they are older, and has all others as the other nodes have them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from unickpt.errors import UnickptError
from unickpt.extend import (
    StepFolder,
    Version,
    leaving_out,
    lost_boxes,
    open_own,
    replace_in_place,
    version_at,
)
from unickpt.plugins.nodes.job import Nodes

_log = logging.getLogger("unickpt")


def recover(nodes: Nodes) -> None:
    """Makes steps readable of which neither the nodes nor the root has all files, if only units are
    missing that their copies left out. Process 0 calls it; what it cannot recover is logged."""
    folder = StepFolder(nodes.location)  # type: ignore[arg-type]
    for number in folder.committed():
        name, version = f"step_{number}", folder.version(number)
        in_root = version_at(nodes.root.location.child(name))
        if version is None or in_root is None or in_root.name != version.name:
            continue
        processes = nodes.uploads.processes(name, version.attempt)
        lost = sorted(processes - nodes.holders(name, version).keys())
        if not lost or not in_root.copied:
            continue
        try:
            if _recovered(nodes, folder, name, version, lost):
                nodes.uploads.note_recovered(name, version.attempt)
        except UnickptError as error:
            _log.warning("%s: newer experts on the nodes are not used: %s", name, error)


def _recovered(
    nodes: Nodes, folder: StepFolder, step: str, version: Version, lost: Sequence[int]
) -> bool:
    """Whether a step has all its chunks now.

    Arguments:
        nodes: of the job.
        folder: of the steps on the nodes.
        step, version: of the step.
        lost: the processes whose files no node has.

    Raises:
        UnickptError: the step or its copy is damaged, or another job saves here.
    """
    reader = open_own(nodes.location.child(step))
    copy = open_own(nodes.root.location.child(step))
    if reader is None or copy is None:
        return False
    boxes = list(lost_boxes(reader, copy, lost))
    if not boxes:
        return True
    for feature in nodes.filters:
        selection = feature.recovered(reader, copy, boxes)
        part = None if selection is None else leaving_out(reader, copy, selection)
        if part is None:
            continue
        folder.lease.take()
        try:
            folder.lease.check()
            return replace_in_place(reader, version, part, nodes.options.timeout_s)
        finally:
            folder.lease.give_back()
    return False
