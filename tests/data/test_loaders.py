"""Loaders that .venv lacks, of Hugging Face and torchtitan: as test_resharding.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from data.test_resharding import eight_six_eight
from support.processes import Processes

pytestmark = [pytest.mark.integration, pytest.mark.environment]

pytest.importorskip("datasets")


def test_hugging_face_datasets(tmp_path: Path, processes: Processes) -> None:
    eight_six_eight(processes, tmp_path, "hugging_face", 60)


def test_hugging_face_datasets_with_worker_processes(tmp_path: Path, processes: Processes) -> None:
    eight_six_eight(processes, tmp_path, "hugging_face_workers", 32, workers=2)


@pytest.mark.parametrize("workers", [0, 1])
def test_torchtitan(workers: int, tmp_path: Path, processes: Processes) -> None:
    pytest.importorskip("torchtitan")
    eight_six_eight(processes, tmp_path, "torchtitan", 50, times=6, workers=workers)
