"""Which saves recognised the tree that they saved."""

from __future__ import annotations

from typing import Any

import pytest

from unickpt.saving import plan_cache


def note_recognised(patch: pytest.MonkeyPatch) -> list[bool]:
    """Lists, for each save from here on, whether a plan of its tree was known."""
    noted, find = list[bool](), plan_cache.PlanCache.find

    def found(cache: plan_cache.PlanCache, *arguments: Any) -> Any:
        tree = find(cache, *arguments)
        noted.append(isinstance(tree, plan_cache.SameTree))
        return tree

    patch.setattr(plan_cache.PlanCache, "find", found)
    return noted
