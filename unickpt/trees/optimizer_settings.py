"""Settings of torch's optimizers, for each group of parameters, and schedulers that may be missing.

Versions of torch add flags to groups (`foreach`, `fused`, `decoupled_weight_decay`) and to
schedulers (`_is_initial`), or drop them (`verbose`), and schedulers add their own settings to
groups (`initial_lr`). torch's `load_state_dict` accepts that only one side has them. A setting that
decides how to train, such as `lr` or `betas`, is never among them.
"""

from __future__ import annotations

import re
from collections.abc import Collection

_SETTING = re.compile(r"((?:.*/)?param_groups/[^/]+/)([^/]+)")
_OF_SCHEDULERS = {
    "initial_lr", "max_lr", "min_lr", "swa_lr", "max_momentum", "base_momentum",
}  # fmt: skip
_DEFAULT = "default_min_lr"  # of ReduceLROnPlateau since 2.5, for groups that are added later


def may_lack(name: str, value: object, names: Collection[str]) -> bool:
    """Whether a leaf that only one side has is such a setting.

    Arguments:
        name: of the leaf.
        value: there.
        names: of the leaves of the other side, which must have the group or the scheduler.

    Example:
        >>> other = ["optim/param_groups/0/lr"]
        >>> may_lack("optim/param_groups/0/fused", None, other)
        True
        >>> may_lack("optim/param_groups/0/momentum", 0.9, other)
        False
        >>> may_lack("scheduler/verbose", False, ["scheduler/last_epoch", "scheduler/_last_lr/0"])
        True
    """
    is_flag = value is None or isinstance(value, bool)
    match = _SETTING.fullmatch(name)
    if match is not None:
        group, key = match.groups()
        return (is_flag or key in _OF_SCHEDULERS) and any(
            other.startswith(group) for other in names
        )
    above, slash, key = name.rpartition("/")
    beside = above + slash  # of the leaves of a scheduler's state, if it is one
    is_setting = is_flag or key == _DEFAULT
    return is_setting and beside + "last_epoch" in names and beside + "_last_lr/0" in names
