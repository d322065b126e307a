"""DeepSpeed's universal checkpoints that unickpt writes, from a template of the same model."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import TESTS, foreign
from support.processes import Processes
from support.saving import files

import unickpt
from unickpt import Rules, SaveOptions, UnsupportedLeaf

FAST = SaveOptions(fsync=False)
SHAPES = {"up.weight": (7, 3), "norm.bias": (5,)}
TAG = "global_step3_universal"


def state() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    slots = {
        slot: {name: rng.random(shape, np.float32) for name, shape in SHAPES.items()}
        for slot in ("fp32", "exp_avg", "exp_avg_sq")
    }
    return {**slots, "step": {"up.weight": np.float32(9), "norm.bias": 9}}


@pytest.fixture
def template(tmp_path: Path) -> Path:
    """As ds_to_universal makes it, of tensors that are all zero."""
    torch = pytest.importorskip("torch")
    folder = tmp_path / "template" / TAG
    for name, shape in SHAPES.items():
        (folder / "zero" / name).mkdir(parents=True)
        for slot in ("fp32", "exp_avg", "exp_avg_sq"):
            value = {"param": torch.zeros(shape), "cat_dim": 1, "sub_param_shape": (2, (3, 1))}
            flat = torch.zeros(int(np.prod(shape)))
            torch.save(
                value if name == "up.weight" else flat, folder / "zero" / name / f"{slot}.pt"
            )
        torch.save(torch.tensor(3.0), folder / "zero" / name / "step.pt")
    (folder / "zero" / "buffer").mkdir()
    torch.save({"param": torch.ones(2)}, folder / "zero" / "buffer" / "fp32.pt")
    torch.save({"param_groups": [{"lr": 0.1}]}, folder / "zero" / "optimizer_state.pt")
    torch.save({"module": {}, "param_shapes": []}, folder / "mp_rank_00_model_states.pt")
    (folder.parent / "latest_universal").write_text(TAG)
    return folder.parent


def export(tree: Any, tmp_path: Path, template: Path) -> Path:
    unickpt.save(tmp_path / "c", tree, options=FAST, overwrite=True)
    options: dict[str, Any] = {"to": "universal", "template": template, "options": FAST}
    unickpt.convert(tmp_path / "c", tmp_path / "out", verify=False, **options)
    return tmp_path / "out"


@pytest.mark.integration
def test_files_are_those_of_the_template_with_other_tensors(tmp_path: Path, template: Path) -> None:
    import torch

    out = export(state(), tmp_path, template)
    assert files(out) == files(template)
    for name in ("mp_rank_00_model_states.pt", "zero/optimizer_state.pt", "zero/buffer/fp32.pt"):
        assert (out / TAG / name).read_bytes() == (template / TAG / name).read_bytes()
    for slot, of_slot in state().items():
        for name, array in of_slot.items():
            found = torch.load(out / TAG / "zero" / name / f"{slot}.pt", weights_only=True)
            if name == "up.weight" and slot != "step":
                assert found.keys() == {"param", "cat_dim", "sub_param_shape"}
                assert (found["cat_dim"], found["sub_param_shape"]) == (1, (2, (3, 1)))
                found = found["param"]
            if isinstance(array, int):
                assert found == array
                continue
            shape = array.shape if name == "up.weight" else (array.size,)
            assert tuple(found.shape) == (shape if slot != "step" else ())
            assert found.numpy().tobytes() == array.tobytes()


RESUME = """
import runpy, sys
sys.path.insert(0, sys.argv.pop(1))
runpy.run_module("support.deepspeed_job", run_name="__main__")
"""
MOMENTS = """
{s=fp32|exp_avg|exp_avg_sq}/{p...} <-> {s}/{p...}
default {leaf...} <-> drop
"""


def without_values(folder: Path) -> None:
    """Clears the tensors of a universal checkpoint."""
    import torch

    for slot in ("fp32", "exp_avg", "exp_avg_sq"):
        for file in folder.glob(f"zero/*/{slot}.pt"):
            value = torch.load(file, weights_only=True)
            (value["param"] if isinstance(value, dict) else value).detach().zero_()
            torch.save(value, file)


@pytest.mark.integration
def test_deepspeed_resumes_from_it(tmp_path: Path, processes: Processes) -> None:
    """From a folder of ZeRO 3 on 4 ranks, through an export, onto 2 ranks of DeepSpeed."""
    if find_spec("deepspeed") is None:
        pytest.skip("needs DeepSpeed")
    path = foreign.unpacked("ds-losses", tmp_path)
    without_values(path / TAG)
    unickpt.convert(
        path / "global_step3",
        tmp_path / "out",
        to="universal",
        template=path / TAG,
        rules=Rules.parse(MOMENTS),
        options=FAST,
    )
    ranks = processes.torch(2, RESUME, TESTS, "resume", tmp_path / "out")
    output, _ = processes.finish(ranks)
    losses = json.loads(output.split("losses")[1].splitlines()[0])
    uninterrupted = json.loads((foreign.FOLDER / "ds-losses" / "losses.json").read_text())
    assert losses == pytest.approx(uninterrupted[3:], rel=2e-6)


@pytest.mark.integration
def test_a_step_for_all_is_that_of_the_template(tmp_path: Path) -> None:
    path = foreign.unpacked("ds-losses", tmp_path)
    rules = Rules.parse(MOMENTS.replace("fp32|", "fp32|step|"))
    options: dict[str, Any] = {"to": "universal", "template": path / TAG, "rules": rules}
    with pytest.raises(UnsupportedLeaf, match=r"'step/up\.weight', because DeepSpeed resumes"):
        unickpt.convert(path / "global_step3", tmp_path / "out", **options)


def test_what_does_not_fit_the_template(tmp_path: Path, template: Path) -> None:
    tree = state()
    tree["fp32"]["up.weight"] = np.zeros((7, 3))
    tree["fp32"]["other"] = np.zeros(3, np.float32)
    del tree["exp_avg"]["norm.bias"]
    with pytest.raises(UnsupportedLeaf) as caught:
        export(tree, tmp_path, template)
    told = str(caught.value)
    for words in (
        "'fp32/up.weight' is float64[7, 3]; in the template it is float32[7, 3]",
        "'exp_avg/norm.bias' is missing",
        "'fp32/other', which is not trained",
    ):
        assert words in told
    assert not (tmp_path / "out").exists()


def test_a_template_is_a_universal_checkpoint(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "c", state(), options=FAST)
    with pytest.raises(ValueError, match="ds_to_universal"):
        unickpt.convert(tmp_path / "c", tmp_path / "out", to="universal", template=tmp_path / "c")
