"""DeepSpeed's universal checkpoints that unickpt writes without a template: files that DeepSpeed's
engines read, checked by torch and by unickpt's reader; test_deepspeed_chain.py has the engines."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import foreign
from support.saving import files
from typer.testing import CliRunner

import unickpt
from unickpt import PerProcess, Rules, SaveOptions, UnsupportedLeaf
from unickpt.cli.app import app

torch = pytest.importorskip("torch")

FAST = SaveOptions(fsync=False)
SHAPES = {"up.weight": (7, 3), "norm.bias": (5,), "temp": ()}
SLOTS = ("fp32", "exp_avg", "exp_avg_sq")
TAG = "global_step9_universal"
MODEL_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")


def state() -> dict[str, Any]:
    """What a trainer that is not DeepSpeed has, under DeepSpeed's names."""
    rng = np.random.default_rng(0)
    slots = {
        slot: {name: rng.random(shape, np.float32) for name, shape in SHAPES.items()}
        for slot in SLOTS
    }
    return {**slots, "step": {name: np.float32(9) for name in SHAPES}}


def exported(tree: Any, folder: Path, **options: Any) -> Path:
    unickpt.save(folder / "c", tree, options=FAST, overwrite=True)
    given: dict[str, Any] = {"to": "universal", "options": FAST, "overwrite": True, **options}
    unickpt.convert(folder / "c", folder / "out", **given)
    return folder / "out"


def loaded(path: Path) -> Any:
    return torch.load(path, weights_only=True)


# --- files ----------------------------------------------------------------------------------------


def test_every_parameter_has_a_file_for_each_slot(tmp_path: Path) -> None:
    out = exported(state(), tmp_path)
    expected = {f"{TAG}/zero/{n}/{s}.pt" for n in SHAPES for s in (*SLOTS, "step")}
    expected |= {f"{TAG}/{name}" for name in (*MODEL_FILES, "zero/optimizer_state.pt")}
    assert set(files(out)) == {*expected, "latest_universal"}
    assert (out / "latest_universal").read_text() == TAG
    for slot in SLOTS:
        for name, array in state()[slot].items():
            found = loaded(out / TAG / "zero" / name / f"{slot}.pt")
            assert found.keys() == {"param"}
            assert found["param"].numpy().tobytes() == array.tobytes()
            assert found["param"].shape == array.shape
    step = loaded(out / TAG / "zero" / "temp" / "step.pt")
    assert (step.dtype, step.shape, step.item()) == (torch.float32, (), 9)


def test_an_engine_keeps_its_own_settings_if_there_are_none(tmp_path: Path) -> None:
    common = loaded(exported(state(), tmp_path) / TAG / "zero/optimizer_state.pt")
    # ZeRO 1 and 2 load as many groups as there are, of at most one for each parameter.
    assert common.pop("param_groups") == [{}, {}, {}]
    of_stage3 = common.pop("optimizer_state_dict")
    step = of_stage3["state"][0]["step"]
    assert (step.dtype, step.shape, step.item()) == (torch.float32, (), 9)
    assert of_stage3["param_groups"] == [{}]
    assert common == {"ds_version": "0.19.8"}


def test_model_files_have_what_engines_ask_for(tmp_path: Path) -> None:
    out = exported(state(), tmp_path)
    first, second = (loaded(out / TAG / name) for name in MODEL_FILES)
    assert first == second
    assert first.pop("param_shapes") == [{name: torch.Size(s) for name, s in SHAPES.items()}]
    assert first == {
        "module": {},
        "global_steps": 9,
        "skipped_steps": 0,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_version": "0.19.8",
    }


def test_unickpt_reads_it_as_it_was(tmp_path: Path) -> None:
    opened = unickpt.open(exported(state(), tmp_path))
    assert {*opened} == {f"{s}/{n}" for s in (*SLOTS, "step") for n in SHAPES}
    for slot, of in state().items():
        for name, array in of.items():
            assert np.asarray(opened[f"{slot}/{name}"][...]).tobytes() == array.tobytes()
    assert opened.index.values["global_steps"] == 9
    assert not [name for name in opened.index.values if "param_groups" in name]


# --- an engine's own values -----------------------------------------------------------------------


def of_engine() -> dict[str, Any]:
    settings = {"betas": (0.9, 0.99), "eps": 1e-8, "amsgrad": False}
    return state() | {
        "global_steps": 11,
        "global_samples": 132,
        "skipped_steps": 2,
        "dp_world_size": 3,
        "mp_world_size": 2,
        "ds_version": "0.17.1",
        "ds_config": {"zero_optimization": {"stage": 1}},
        "lr_scheduler": {"last_epoch": 11, "base_lrs": [0.1, 0.1], "factor": np.ones(2)},
        "client_state": {"iteration": 4, "deep": [{"tensor": np.arange(3)}]},
        "optimizer": {
            "param_groups": [
                {"lr": 0.1, "weight_decay": 0.2, **settings, "params": ["up.weight"]},
                {"lr": 0.1, "weight_decay": 0.0, **settings, "params": ["norm.bias", "temp"]},
            ],
            "clip_grad": 1.5,
            "loss_scaler": {"cur_scale": 1.0, "dynamic": False},
            "dynamic_loss_scale": False,
            "overflow": True,
        },
    }


def test_settings_of_groups_are_those_of_the_source(tmp_path: Path) -> None:
    out = exported(of_engine(), tmp_path) / TAG.replace("9", "11")
    common = loaded(out / "zero/optimizer_state.pt")
    groups = common["param_groups"]
    settings = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "amsgrad": False}
    assert groups == [settings | {"weight_decay": 0.2}, settings | {"weight_decay": 0.0}] + [{}] * 3
    # In ZeRO 3 all groups take one's: only that in which they agree.
    assert common["optimizer_state_dict"]["param_groups"] == [settings]
    assert (common["clip_grad"], common["ds_version"]) == (1.5, "0.17.1")
    assert not {"loss_scaler", "dynamic_loss_scale", "overflow"} & common.keys()


def test_counters_schedules_and_the_users_own_state(tmp_path: Path) -> None:
    out = exported(of_engine(), tmp_path)
    model = loaded(out / TAG.replace("9", "11") / MODEL_FILES[0])
    expected = of_engine()
    for key in ("global_steps", "global_samples", "skipped_steps", "dp_world_size", "ds_config"):
        assert model[key] == expected[key]
    assert model["mp_world_size"] == 1  # there is one model file
    assert model["lr_scheduler"]["base_lrs"] == [0.1, 0.1]
    assert model["lr_scheduler"]["factor"].tolist() == [1, 1]
    assert (model["iteration"], model["deep"][0]["tensor"].tolist()) == (4, [0, 1, 2])
    opened = unickpt.open(out)
    assert opened.index.values["client_state/iteration"] == 4
    assert opened.index.values["optimizer/param_groups/1/weight_decay"] == 0.0
    assert "optimizer/param_groups/2" not in {n[:24] for n in opened.index.values}


def test_the_state_of_a_process_is_that_of_the_first(tmp_path: Path) -> None:
    packed = {"t": {"torch.Tensor": np.arange(3), "dtype": "int64"}, "n": [1, "a"]}
    out = exported({**state(), "client_state": PerProcess(packed)}, tmp_path)
    model = loaded(out / TAG / MODEL_FILES[1])
    assert (model["t"].tolist(), model["n"]) == ([0, 1, 2], [1, "a"])


def test_a_scale_of_losses_that_changes_goes_along(tmp_path: Path) -> None:
    scaler = {
        "cur_scale": 64.0, "cur_iter": 5, "last_overflow_iter": 2, "scale_factor": 2.0,
        "scale_window": 100, "min_scale": 1, "delayed_shift": 2, "cur_hysteresis": 1,
        "consecutive_hysteresis": False, "raise_error_at_min_scale": True, "dynamic": True,
    }  # fmt: skip
    tree = state() | {"optimizer": {"loss_scaler": scaler, "dynamic_loss_scale": True}}
    out = exported(tree, tmp_path)
    path = out / TAG / "zero/optimizer_state.pt"
    assert torch.serialization.get_unsafe_globals_in_checkpoint(path) == [
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"
    ]
    values = unickpt.open(out).index.values
    found = {n.rpartition("/")[2]: v for n, v in values.items() if "/loss_scaler/" in n}
    assert {name: found[name] for name in scaler} == scaler
    assert found["dtype"].class_name == "torch.float16"
    del scaler["min_scale"]
    with pytest.raises(UnsupportedLeaf, match=r"loss_scaler, which lacks min_scale"):
        exported(tree, tmp_path)


def test_steps_of_python_stay_numbers(tmp_path: Path) -> None:
    """As DeepSpeed's own optimizers count them."""
    tree = state() | {"step": dict.fromkeys(SHAPES, 9)}
    out = exported(tree, tmp_path) / TAG
    step = loaded(out / "zero/temp/step.pt")
    common = loaded(out / "zero/optimizer_state.pt")
    assert (type(step), step) == (int, 9)
    assert common["optimizer_state_dict"]["state"] == {0: {"step": 9}}


def test_steps_that_differ_are_for_zero_1_and_2(tmp_path: Path) -> None:
    tree = state()
    tree["step"]["temp"] = np.float32(4)
    with pytest.raises(UnsupportedLeaf, match="global_steps is missing"):
        exported(tree, tmp_path)
    out = exported({**tree, "global_steps": 9}, tmp_path) / TAG
    assert loaded(out / "zero/temp/step.pt").item() == 4
    assert "optimizer_state_dict" not in loaded(out / "zero/optimizer_state.pt")


# --- what is tied, and what is not trained --------------------------------------------------------


def test_each_name_of_a_tied_parameter_has_all_files(tmp_path: Path) -> None:
    """Which of them an engine looks for depends on its module."""
    tree = state()
    tree["fp32"]["head.weight"] = tree["fp32"]["up.weight"]
    tree["module"] = {"head.weight": tree["fp32"]["up.weight"]}
    out = exported(tree, tmp_path) / TAG
    for slot in (*SLOTS, "step"):
        one, other = ((out / "zero" / n / f"{slot}.pt") for n in ("up.weight", "head.weight"))
        assert one.read_bytes() == other.read_bytes()
    assert loaded(out / MODEL_FILES[0])["module"] == {}


def with_untrained() -> dict[str, Any]:
    tree = state()
    module = {"scale": np.arange(4, dtype=np.int64), "frozen": np.ones((2, 3), np.float16)}
    tree["fp32"] |= {"frozen": np.ones((2, 3), np.float32), "other": np.ones(2, np.float32)}
    rounded = {name: array.astype(np.float16) for name, array in state()["fp32"].items()}
    return {**tree, "module": {**rounded, **module}}


def test_what_is_not_trained_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedLeaf) as caught:
        exported(with_untrained(), tmp_path)
    told = str(caught.value)
    for name in ("'module/scale'", "'module/frozen'", "'fp32/other'"):
        assert f"{name}, which no optimizer trains" in told
    assert "up.weight" not in told
    assert "--untrained" in told
    assert not (tmp_path / "out").exists()


def test_what_is_not_trained_is_written_if_asked_for(tmp_path: Path) -> None:
    out = exported(with_untrained(), tmp_path, untrained=True)
    for name in MODEL_FILES:
        module = loaded(out / TAG / name)["module"]
        assert module.keys() == {"scale", "frozen", "other"}
        assert module["scale"].tolist() == [0, 1, 2, 3]
        assert module["frozen"].dtype == torch.float16
    assert {p.name for p in (out / TAG / "zero").iterdir()} == {*SHAPES, "optimizer_state.pt"}
    opened = unickpt.open(out)
    assert np.asarray(opened["module/other"][...]).tolist() == [1, 1]


def test_what_follows_from_the_rest_is_left_out(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "c", with_untrained(), options=FAST)
    report = unickpt.convert(
        tmp_path / "c", tmp_path / "out", to="universal", untrained=True, options=FAST
    )
    assert {*report.left_out} == {*(f"module/{name}" for name in SHAPES), "fp32/frozen"}
    assert report.arrays == 4 * len(SHAPES) + 3


# --- what is refused ------------------------------------------------------------------------------


def _changed(tree: dict[str, Any], path: str, value: Any) -> None:
    top, _, name = path.partition("/")
    if value is None:
        del tree[top][name]
    elif name:
        tree.setdefault(top, {})[name] = value
    else:
        tree[top] = value


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("fp32/temp", np.float64(1), "'fp32/temp': float64[], but DeepSpeed keeps float32"),
        ("exp_avg/up.weight", np.ones((3, 7), np.float32), "float32[3, 7], and fp32/up.weight is"),
        ("exp_avg_sq/norm.bias", None, "exp_avg_sq/norm.bias is missing"),
        ("fp32/norm.bias", None, "'exp_avg/norm.bias', of no parameter that is trained"),
        ("step/temp", None, "step/temp is missing"),
        ("step/temp", np.int32(9), "'step/temp': int32[], but torch counts steps in float32[]"),
        ("step/temp", "9", "'step/temp', which is no number"),
        ("step/gone", np.float32(9), "'step/gone', of no parameter that is trained"),
        ("mu_product/temp", 0.5, "'mu_product/temp', a number"),
        ("fp32/..", np.float32(1), "which is no <slot>/<parameter>"),
        ("fp32/a/b", np.float32(1), "which is no <slot>/<parameter>"),
        ("fp32/deep", {"er": np.float32(1)}, "'fp32/deep/er', which is no <slot>/<parameter>"),
        ("fp32/up.weight@1", np.float32(1), "the part of one tensor-parallel rank"),
        ("fp32/mlp.deepspeed_experts.1.w", np.float32(1), "an expert"),
        ("epoch", 3, "'epoch', which is no <slot>/<parameter>"),
        ("client_state/module", 3, "client_state/module, which DeepSpeed would take for its own"),
        ("client_state", 3, "client_state, which is no dict"),
        ("optimizer", {"param_groups": 3}, "optimizer/param_groups, which is no list"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(
    tmp_path: Path, path: str, value: Any, told: str
) -> None:
    tree = copy.deepcopy(state())
    _changed(tree, path, value)
    with pytest.raises(UnsupportedLeaf) as caught:
        exported(tree, tmp_path)
    assert told in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_weights_alone_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedLeaf, match="there are no slots of an optimizer"):
        exported({"fp32": state()["fp32"]}, tmp_path)


# --- from DeepSpeed's own folders, beside DeepSpeed's own converter -------------------------------


def test_parameters_are_as_ds_to_universal_makes_them(tmp_path: Path) -> None:
    path = foreign.unpacked("ds-losses", tmp_path)
    out = tmp_path / "out"
    command = ["export", str(path / "global_step3"), str(out), "--to", "universal"]
    assert CliRunner().invoke(app, command).exit_code == 0
    ours, theirs = (folder / "global_step3_universal/zero" for folder in (out, path))
    found = [file.relative_to(theirs) for file in theirs.glob("*/*.pt")]
    assert len(found) == 24
    for file in found:
        one, other = (torch.load(folder / file, weights_only=True) for folder in (ours, theirs))
        assert torch.equal(one["param"].flatten(), other)  # flat, as of ZeRO 3


def test_rules_bring_another_trainers_tree_over(tmp_path: Path) -> None:
    """As FSDP2 and `NamedOptimizer` have it; hyper-parameters go along by a rule of one's own."""
    kept = state()
    tree = {
        "model": kept["fp32"],
        "optim": {
            "state": {
                name: {slot: kept[slot][name] for slot in ("exp_avg", "exp_avg_sq", "step")}
                for name in SHAPES
            },
            "param_groups": [{"lr": 0.3, "params": [*SHAPES]}],
        },
    }
    out = exported(tree, tmp_path, rules=Rules.preset("deepspeed").inverse) / TAG
    found = loaded(out / "zero/up.weight/exp_avg.pt")["param"]
    assert found.numpy().tobytes() == kept["exp_avg"]["up.weight"].tobytes()
    assert loaded(out / "zero/optimizer_state.pt")["param_groups"] == [{}] * 3
    own = Rules.parse(
        "optim/param_groups/{g...} <-> optimizer/param_groups/{g...}\n"
        "default model/{p...} <-> fp32/{p...}\n"
        "optim/state/{p...}/{s=exp_avg|exp_avg_sq|step} <-> {s}/{p...}\n"
    )
    out = exported(tree, tmp_path, rules=own) / TAG
    assert loaded(out / "zero/optimizer_state.pt")["param_groups"] == [{"lr": 0.3}] + [{}] * 3
