"""What the options of saving and of loading have in common."""

from __future__ import annotations

from numbers import Real
from typing import Self

from unickpt.frameworks import budget
from unickpt.frameworks.process_group import Group
from unickpt.frameworks.registry import processes_here


class CommonOptions:
    """What `SaveOptions` and `LoadOptions` have in common."""

    budget_bytes: int | None
    group: Group | None

    @property
    def working_bytes(self) -> int:
        """Bytes of memory that this process may use to read and write."""
        if isinstance(self.budget_bytes, budget.ProcessBytes):
            return int(self.budget_bytes)
        return budget.share(self.budget_bytes, processes_here(self.group))

    @classmethod
    def or_default(cls, given: object) -> Self:
        """The given options; the default ones for None.

        Raises:
            TypeError: they are not options, or those of the other kind.
        """
        if given is None:
            return cls()
        if not isinstance(given, cls):
            raise TypeError(
                f"options must be unickpt.{cls.__name__}(...), not of type {type(given).__name__}"
            )
        return given


def check_number(name: str, value: object) -> None:
    if not isinstance(value, Real) or not float(value) > 0:
        raise ValueError(f"{name}={value!r} must be a positive number")


def check_group(group: object) -> None:
    if group is not None and not hasattr(group, "next_attempt"):
        raise TypeError(
            f"group is of type {type(group).__name__}; omit it under torch.distributed and "
            "jax.distributed, else pass unickpt.ProcessGroup(index, count, session)"
        )
