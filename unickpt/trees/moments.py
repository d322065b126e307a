"""Arrays that look like the moments of an optimizer, by their names and shapes."""

from __future__ import annotations

from collections.abc import Collection, Mapping

# Components of the names of moments: of torch's optimizers; and of optax', which parameters may
# have as well, so that an array counts as one only if a parameter has the same end and shape. The
# words of first and second moments count only together, or next to a step count.
_MOMENTS = {
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg",
    "acc_delta", "row_var", "col_var",
}  # fmt: skip
_TWINS = {"mu", "nu", "m", "v", "momentum", "trace", "velocity", "sum_of_squares"}
_TOGETHER = {"mu": "nu", "nu": "mu", "m": "v", "v": "m"}
_COUNT = "count"

Shape = tuple[int, ...]


def moments_among(names: Collection[str], shapes: Mapping[str, Shape]) -> list[str]:
    """The names that look like those of moments.

    Arguments:
        names: of some arrays.
        shapes: of all arrays by name, the parameters included.

    Example:
        >>> shapes = {"params/up": (3, 5), "opt/0/trace/up": (3, 5), "params/mu": (3, 5)}
        >>> moments_among(shapes, shapes)
        ['opt/0/trace/up']
    """
    arrays = [name for name in names if name in shapes]
    parts = {name: name.split("/") for name in arrays}
    twins = {name for name in arrays if not _TWINS.isdisjoint(parts[name])}
    ends = _ends(shapes) if twins else {}
    return [
        name
        for name in arrays
        if not _MOMENTS.isdisjoint(parts[name])
        or (name in twins and _has_parameter(parts[name], shapes, ends))
    ]


def _has_parameter(
    parts: list[str], shapes: Mapping[str, Shape], ends: Mapping[tuple[str, Shape], Collection[str]]
) -> bool:
    """Whether an array named like a moment has a parameter, and the other marks of moments."""
    index = max(i for i, part in enumerate(parts) if part in _TWINS)
    above, end = "".join(f"{part}/" for part in parts[:index]), "/".join(parts[index + 1 :])
    other = _TOGETHER.get(parts[index])
    if other is not None and not {f"{above}{other}/{end}", above + _COUNT} & shapes.keys():
        return False
    parameters = ends.get((end, shapes["/".join(parts)]), ())
    return any(not above or not name.startswith(above) for name in parameters)


def _ends(shapes: Mapping[str, Shape]) -> dict[tuple[str, Shape], list[str]]:
    """The names of arrays without a slot in their names, by each suffix and the shape."""
    names_by_end: dict[tuple[str, Shape], list[str]] = {}
    for name, shape in shapes.items():
        parts = name.split("/")
        if _TWINS.isdisjoint(parts):
            for start in range(len(parts)):
                names_by_end.setdefault(("/".join(parts[start:]), shape), []).append(name)
    return names_by_end
