"""How checkpoints grow that refer to a full one, and when to write a full one again.

Each save by patches keeps the full checkpoint, and the bytes written since that are still needed.
Check-N-Run (arXiv 2010.08679) takes a full checkpoint where the increments to come, as large as the
last, are expected to cost more than beginning again. So does `Growth.predicts_full`; its costs are
the bytes written, and the bytes kept for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields
from typing import Any

from unickpt.errors import CheckpointCorrupt
from unickpt.extend import quoted


@dataclass(frozen=True)
class Growth:
    """All saves since one wrote everything; in bytes as they are stored, of all processes.

    Arguments:
        saves: how many there were, without that one.
        full: bytes that that one wrote.
        written: bytes that these wrote together.
        kept: bytes that each of these kept besides a full checkpoint, summed up.
        last: bytes that the last of them kept besides a full checkpoint.
    """

    saves: int
    full: int
    written: int = 0
    kept: int = 0
    last: int = 0

    @property
    def stored(self) -> list[int]:
        """As the index has it."""
        return list(astuple(self))

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> Growth | None:
        """The growth in a checkpoint's index; None if there is none.

        Arguments:
            extra: the features' entries in the index.

        Raises:
            CheckpointCorrupt: it has something else there.
        """
        body = extra.get("incremental", {})
        stored = body.get("growth") if isinstance(body, dict) else body
        if stored is None:
            return None
        is_known = isinstance(stored, list) and len(stored) == len(fields(cls))
        if not is_known or not all(type(n) is int and n >= 0 for n in stored):
            raise CheckpointCorrupt(f"its index has the growth {quoted(stored)}")
        return cls(*stored)

    def then(self, written: int, kept: int) -> Growth:
        """After one more save.

        Arguments:
            written: bytes that it wrote.
            kept: bytes that it needs in all, new or not.
        """
        beside = max(0, kept - self.full)
        return Growth(self.saves + 1, self.full, self.written + written, self.kept + beside, beside)

    def predicts_full(self, kept_cost: float) -> bool:
        """Whether writing everything again is expected to cost less than continuing.

        The mean cost of all saves since the last full one, that one included, falls as long as the
        next save costs less than it; then beginning again gives the lowest mean. Patches refer to
        states of different age, so the written bytes go up and down: the mean of all so far
        predicts them best. The last value predicts the kept bytes.

        Arguments:
            kept_cost: the cost of keeping a byte until the next save, if writing it costs 1.
        """
        if not self.saves:
            return False
        mean = (self.full + self.written + kept_cost * self.kept) / (self.saves + 1)
        return mean <= self.written / self.saves + kept_cost * self.last
