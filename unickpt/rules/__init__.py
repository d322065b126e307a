"""Rules: one notation that relates names and axes of two sides, both ways (docs/rules.md).

Parse (`parser`, `rule`, `rule_set`) -> plan (`matching`, `conflicts`, `planner`) -> apply
(`unickpt.reading.recipes`, while reading).
"""
