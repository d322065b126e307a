"""Files that vanish while a save runs: it fails, and what was there before stays."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.saving import numbers, same

import unickpt
from unickpt.commit.coordinator import Coordinator


@pytest.mark.parametrize("pattern", ["*/00000/d/*", "*/root/*"])
def test_a_save_whose_files_were_removed_fails_and_replaces_nothing(
    pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unickpt.save(tmp_path / "x", numbers(1))
    processes, real = tmp_path / "x" / "processes", Coordinator._announce
    old = set(processes.glob(pattern))

    def announce(self: Coordinator, *arguments: object) -> None:
        real(self, *arguments)  # type: ignore[arg-type]
        (set(processes.glob(pattern)) - old).pop().unlink()

    monkeypatch.setattr(Coordinator, "_announce", announce)
    with pytest.raises(unickpt.StorageError, match="are gone"):
        unickpt.save(tmp_path / "x", numbers(2), overwrite=True)
    assert same(unickpt.load(tmp_path / "x"), numbers(1))
