"""Settings that torch's optimizers keep of each group of parameters, and that may be missing.

Versions of torch add flags (`foreach`, `fused`, `decoupled_weight_decay`), and schedulers add their
own settings (`initial_lr`). torch's `load_state_dict` does without those that only one side has. A
setting that decides how to train, such as `lr` or `betas`, is never among them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_SETTING = re.compile(r"((?:.*/)?param_groups/[^/]+/)([^/]+)")
_OF_SCHEDULERS = {
    "initial_lr", "max_lr", "min_lr", "swa_lr", "max_momentum", "base_momentum",
}  # fmt: skip


def may_lack(name: str, value: object, names: Iterable[str]) -> bool:
    """Whether a leaf that only one side has is such a setting.

    Arguments:
        name: of the leaf.
        value: there.
        names: of the leaves of the other side, which must have the group.

    Example:
        >>> other = ["optim/param_groups/0/lr"]
        >>> may_lack("optim/param_groups/0/fused", None, other)
        True
        >>> may_lack("optim/param_groups/0/momentum", 0.9, other)
        False
    """
    found = _SETTING.fullmatch(name)
    if found is None:
        return False
    group, key = found.groups()
    is_flag = value is None or isinstance(value, bool)
    return (is_flag or key in _OF_SCHEDULERS) and any(each.startswith(group) for each in names)
