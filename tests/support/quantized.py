"""What the index says of quantised arrays."""

from typing import Any

from unickpt.format.index import ArrayEntry


def codes_of(entry: ArrayEntry) -> str | None:
    """The codes of an array; None if it is not quantised."""
    return entry.settings["codes"] if entry.codec == "quantized" else None


def errors_of(entry: ArrayEntry) -> tuple[float, ...]:
    """The largest absolute and relative error of a quantised array."""
    return tuple(entry.extra["quantized"]["errors"])


def quantized_as(codes: str, errors: tuple[float, float] = (0.0, 0.0)) -> dict[str, Any]:
    """The fields of an entry that is quantised."""
    encoding = (("unickpt.quantized", (("codes", codes),)),)
    return {"encoding": encoding, "extra": {"quantized": {"errors": list(errors)}}}
