"""The fixtures of presets are what the sources make, in their own environments."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from support import TESTS, preset_cases

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the sources


def maker(name: str) -> Any:
    """The script that makes a fixture."""
    path = Path(TESTS) / "fixtures" / "presets" / f"make_{name}.py"
    spec = importlib.util.spec_from_file_location(f"make_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def same(name: str, only: str) -> None:
    made = sorted(maker(name).cases(only), key=lambda case: case.preset)
    assert made
    assert made == [case for case in preset_cases.read(name) if case.preset.startswith(only)]


@pytest.mark.parametrize("preset", ["maxtext-qwen3", "maxtext-gemma2", "maxtext-gpt-oss"])
def test_maxtext(preset: str) -> None:
    pytest.importorskip("maxtext.checkpoint_conversion.to_huggingface")
    same("maxtext", preset)


def test_maxtext_llama4() -> None:
    pytest.importorskip("maxtext.checkpoint_conversion.standalone_scripts.llama4_ckpt_unscanned")
    same("maxtext_llama4", "maxtext-llama4")


def test_litgpt() -> None:
    pytest.importorskip("litgpt")
    same("litgpt", "litgpt-")


def test_torchtitan() -> None:
    pytest.importorskip("torchtitan")
    same("torchtitan", "torchtitan-")


def test_transformers5() -> None:
    pytest.importorskip("transformers.conversion_mapping")
    same("transformers5", "transformers5-")
