"""Rules: one notation that relates names and axes of two sides, both ways (docs/rules.md).

Parse (`parser`, `rule`, `rule_set`) -> plan (`matching`, `conflicts`, `planner`) -> apply
(`unickpt.reading.recipes`, while reading).
"""

from unickpt.rules.functions import Function
from unickpt.rules.rule_set import PRESETS, Rules, preset_text

__all__ = ["PRESETS", "Function", "Rules", "preset_text"]
