"""Joins the nodes of a job: `Checkpointer(root, node_local=...)`."""

from __future__ import annotations

from functools import partial
from typing import Any

from unickpt import SaveOptions
from unickpt.errors import InvalidPath
from unickpt.extend import PathLike, StepFolder, Tier, resolve_path
from unickpt.plugins.nodes.job import Nodes
from unickpt.plugins.nodes.node_parity import restore
from unickpt.plugins.nodes.node_steps import NodeSteps
from unickpt.plugins.nodes.options import NodeOptions
from unickpt.plugins.nodes.recovered_units import recover
from unickpt.plugins.nodes.uploads import NodeCopying


def join(root: StepFolder, path: PathLike, arguments: dict[str, Any], options: SaveOptions) -> Tier:
    """Joins the nodes of a job; all of its processes call this.

    Arguments:
        root: the folder of the run.
        path: a folder of this node.
        arguments: of the Checkpointer; `NodeOptions` are removed.
        options: of its saves.

    Raises:
        InvalidPath: the path is no local folder.
        SaveTimeout: other processes do not join.
        ValueError: an option does not fit.
    """
    if arguments.get("reuse"):
        raise ValueError("reuse= refers to earlier steps; with node_local, omit it")
    if options.base is not None or options.changed is not None:
        raise ValueError("base= and changed= refer to earlier steps; with node_local, omit them")
    chosen, local = NodeOptions.take(arguments), resolve_path(path)
    if not local.is_local:
        raise InvalidPath(
            f"node_local={str(local)!r} must be a folder of each node, such as /dev/shm/run"
        )
    nodes = Nodes(root, local.path, chosen, options)
    try:
        if any(member.sums for member in nodes.members):
            restore(nodes)
        if nodes.filters:
            if nodes.group.index == 0:
                recover(nodes)
            nodes.gather_again()  # the others wait for process 0
    except BaseException:
        nodes.close()
        raise
    return Tier(NodeSteps(nodes), partial(NodeCopying, nodes), takes_all=True)
