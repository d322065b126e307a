"""The presets of Megatron-Core and of DCP, onto modules and their optimizers."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.foreign import unpacked
from support.torch_versions import DCP_ALONE

import unickpt
from unickpt import Checkpoint, Rules
from unickpt.errors import RuleError

torch = pytest.importorskip("torch")

HEADS, GROUPS = 4, 2  # of the generators' models


def module_of(shapes: Mapping[str, tuple[int, ...]], dtype: Any) -> Any:
    """A module with parameters of these names."""
    root = torch.nn.Module()
    for name, shape in shapes.items():
        *above, last = name.split(".")
        level = root
        for part in above:
            if not hasattr(level, part):
                level.add_module(part, torch.nn.Module())
            level = getattr(level, part)
        level.register_parameter(last, torch.nn.Parameter(torch.full(shape, 9.0, dtype=dtype)))
    return root


class WithExtraState(torch.nn.Module):
    """As modules of Transformer Engine."""

    def get_extra_state(self) -> Any:
        return torch.ones(2)

    def set_extra_state(self, state: Any) -> None:
        assert torch.equal(state, torch.ones(2))


def optimizer_of(module: Any) -> Any:
    from unickpt.adapters.torch import NamedOptimizer

    return NamedOptimizer(torch.optim.AdamW(module.parameters(), lr=0.25), module)


def numpy_of(tensor: Any) -> np.ndarray:
    found = tensor.detach()
    return found.float().numpy() if found.dtype == torch.bfloat16 else found.numpy()


def stored_of(path: Path) -> Checkpoint:
    return unickpt.open(path)


def same(tensor: Any, expected: Any) -> bool:
    return np.array_equal(numpy_of(tensor), np.asarray(expected).astype(np.float32))


def gpt(stored: Checkpoint, local: bool = False) -> dict[str, tuple[str, int | None]]:
    """The names of GPTModel's parameters, with the array and the layer of each."""
    renamed = {
        "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
        "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
    }
    found: dict[str, tuple[str, int | None]] = {}
    for name, array in stored.items():
        if name.startswith("optimizer"):
            continue
        if not name.startswith("decoder.layers."):
            found[name] = (name, None)
            continue
        of_layer = name.removeprefix("decoder.layers.")
        for key, other in renamed.items() if local else ():
            of_layer = of_layer.replace(key, other)
        for layer in range(array.shape[0]):
            found[f"decoder.layers.{layer}.{of_layer}"] = (name, layer)
    return found


def slot_of(stored: Checkpoint, name: str, layer: int | None) -> np.ndarray:
    array = stored[name][...]
    return array if layer is None else array[layer]


@pytest.mark.parametrize(
    ("case", "local"),
    [("mc-optim-tp2-pp2", False), ("mc-optim-tp2-pp2", True), ("mc-distopt-full", False)],
)
def test_gpt_and_its_optimizer(case: str, local: bool, tmp_path: Path) -> None:
    stored = stored_of(unpacked(case, tmp_path))
    names = gpt(stored, local)
    shapes = {n: slot_of(stored, *of).shape for n, of in names.items()}
    module = module_of(shapes, torch.bfloat16)
    module.decoder.add_module("fp8", WithExtraState())
    optimizer = optimizer_of(module)
    like = {"model": module, "optim": optimizer}
    unickpt.load(tmp_path / "ckpt", like, rules=Rules.preset("megatron"))
    for name, parameter in module.named_parameters():
        of, layer = names[name]
        assert same(parameter, slot_of(stored, of, layer)), name
        state = optimizer.optimizer.state[parameter]
        for slot in ("exp_avg", "exp_avg_sq"):
            expected = slot_of(stored, f"optimizer.state.{slot}.{of}", layer)
            assert same(state[slot], expected), (slot, name)
        assert state["step"].item() == 3.0
    assert optimizer.optimizer.param_groups[0]["lr"] == 0.25


def llama(stored: Checkpoint, prefix: str = "") -> dict[str, np.ndarray]:
    """What Megatron's matrices are in transformers' Llama, as converters take them apart."""
    found: dict[str, np.ndarray] = {}

    def whole(name: str) -> np.ndarray:
        return np.asarray(stored[prefix + name][...]).astype(np.float32)

    found["model.embed_tokens.weight"] = whole("embedding.word_embeddings.weight")
    found["model.norm.weight"] = whole("decoder.final_layernorm.weight")
    found["lm_head.weight"] = whole("output_layer.weight")
    qkv = whole("decoder.layers.self_attention.linear_qkv.weight")
    per_group = HEADS // GROUPS
    for layer in range(qkv.shape[0]):
        at = f"model.layers.{layer}."
        groups = qkv[layer].reshape(GROUPS, per_group + 2, -1, qkv.shape[2])
        for name, part in (
            ("q", groups[:, :per_group]),
            ("k", groups[:, per_group]),
            ("v", groups[:, per_group + 1]),
        ):
            found[f"{at}self_attn.{name}_proj.weight"] = part.reshape(-1, qkv.shape[2])
        gate, up = np.split(whole("decoder.layers.mlp.linear_fc1.weight")[layer], 2)
        found |= {f"{at}mlp.gate_proj.weight": gate, f"{at}mlp.up_proj.weight": up}
        for name, of in (
            ("self_attn.o_proj", "self_attention.linear_proj.weight"),
            ("mlp.down_proj", "mlp.linear_fc2.weight"),
            ("input_layernorm", "self_attention.linear_qkv.layer_norm_weight"),
            ("post_attention_layernorm", "mlp.linear_fc1.layer_norm_weight"),
        ):
            found[f"{at}{name}.weight"] = whole(f"decoder.layers.{of}")[layer]
    return found


def test_llama_of_transformers_and_its_optimizer(tmp_path: Path) -> None:
    path = unpacked("mc-optim-tp2-pp2", tmp_path)
    stored = stored_of(path)
    expected = llama(stored)
    # Megatron padded the vocabulary: the model's has three words less.
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        expected[name] = expected[name][:-3]
    module = module_of({n: a.shape for n, a in expected.items()}, torch.bfloat16)
    optimizer = optimizer_of(module)
    rules = Rules.preset("megatron-llama", sizes={"g": GROUPS})
    # The generator's model has norms with biases, which no Llama has.
    like = {"model": module, "optim": optimizer}
    _, report = unickpt.load(path, like, rules=rules, strict=False, return_report=True)
    assert all(name.startswith("optim/param_groups") for name in report.kept)
    assert all(name.endswith("bias") for name in report.skipped)
    slots = {slot: llama(stored, f"optimizer.state.{slot}.") for slot in ("exp_avg", "exp_avg_sq")}
    for name, parameter in module.named_parameters():
        assert same(parameter, expected[name]), name
        state = optimizer.optimizer.state[parameter]
        for slot, arrays in slots.items():
            assert same(state[slot], arrays[name][: parameter.shape[0]]), (slot, name)


def test_buckets_without_names_are_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    path = unpacked("mc-distopt-dp", tmp_path)
    names = gpt(stored_of(path))
    module = module_of({n: slot_of(stored_of(path), *of).shape for n, of in names.items()}, None)
    like = {"model": module.to(torch.bfloat16), "optim": optimizer_of(module)}
    with pytest.raises(RuleError, match=r"(?s)bucket_idx.*no file says which.*fully_reshardable"):
        unickpt.load(path, like, rules=Rules.preset("megatron"))
    unickpt.load(path, {"model": module}, rules=Rules.preset("megatron"), strict=False)
    name, (of, layer) = next(iter(names.items()))
    assert same(module.get_parameter(name), slot_of(stored_of(path), of, layer))


def save(state: Mapping[str, Any], path: Path, flatten: bool = True) -> Path:
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    planner = dcp.DefaultSavePlanner(flatten_state_dict=flatten)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is only this process
        dcp.save(dict(state), checkpoint_id=path, planner=planner, **DCP_ALONE)
    return path


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("grouped", [True, False])
def test_experts_and_their_optimizers(stacked: bool, grouped: bool, tmp_path: Path) -> None:
    whole = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5)
    name = "mlp.experts.experts.linear_fc1.weight"
    weights = {name: whole, "mlp.router.weight": torch.ones(2, 3, 5)}
    state = {}
    # Megatron has more than two when the first part of a model gets an optimizer of its own.
    for chain, (key, value) in enumerate(
        sorted(weights.items(), reverse=True), 0 if stacked else 2
    ):
        for layer in (None,) if stacked else range(2):
            full = f"decoder.layers.{key}" if layer is None else f"decoder.layers.{layer}.{key}"
            part = value if layer is None else value[layer]
            state[full] = part
            for slot, factor in (("exp_avg", 2), ("exp_avg_sq", 3), ("fp32_param", 1)):
                state[f"chained_{chain}.optimizer.state.{slot}.{full}"] = factor * part
    path = save(state, tmp_path / "c", flatten=False)
    optimizer = {
        "optimizer": {"param_groups": [{"step": 5, "lr": 1.0}]},
        "param_state_sharding_type": "fully_reshardable",
    }
    chains = dict.fromkeys(range(2 if stacked else 4), optimizer)
    torch.save({"iteration": 3, "optimizer": chains}, path / "common.pt")
    (path / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    expert = "linear_fc1.weight{}" if grouped else "local_experts.{}.linear_fc1.weight"
    at = "decoder.layers.{}.mlp.{}"
    expected = {
        at.format(layer, f"experts.{expert.format(x)}"): whole[layer, x]
        for layer in range(2)
        for x in range(3)
    }
    expected |= {at.format(layer, "router.weight"): torch.ones(3, 5) for layer in range(2)}
    module = module_of({n: tuple(value.shape) for n, value in expected.items()}, torch.float32)
    named = optimizer_of(module)
    rules = Rules.preset("megatron")
    unickpt.load(path, {"model": module, "optim": named}, rules=rules)
    for name, parameter in module.named_parameters():
        slots = named.optimizer.state[parameter]
        assert torch.equal(parameter, expected[name])
        assert torch.equal(slots["exp_avg"], 2 * expected[name])
        assert torch.equal(slots["exp_avg_sq"], 3 * expected[name])
        assert slots["step"].item() == 5


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize(
    "kind", [("model", "optim"), ("model", "optimizer"), ("app/model", "app/optim")]
)
def test_dcp_of_a_model_and_its_optimizer(
    kind: tuple[str, str], fresh: bool, tmp_path: Path
) -> None:
    state_dict = pytest.importorskip("torch.distributed.checkpoint.state_dict")

    def net() -> Any:
        return torch.nn.Sequential(
            torch.nn.Linear(3, 4), torch.nn.Sequential(torch.nn.Linear(4, 2))
        )

    def with_optimizer(steps: int) -> tuple[Any, Any]:
        module = net()
        groups = [{"params": m.parameters(), "lr": 0.1 * (n + 1)} for n, m in enumerate(module)]
        optimizer = torch.optim.AdamW(groups)
        for _ in range(steps):
            module(torch.ones(5, 3)).sum().backward()
            optimizer.step()
        return module, optimizer

    module, optimizer = with_optimizer(3)
    parts = dict(zip(kind, state_dict.get_state_dict(module, optimizer), strict=True))
    state: dict[str, Any] = {}
    for name, value in parts.items():
        above, _, last = name.rpartition("/")
        (state.setdefault(above, {}) if above else state)[last] = value
    path = save(state, tmp_path / "c")
    other, into = with_optimizer(0 if fresh else 1)
    for group in into.param_groups:
        group["lr"] = 7.0
    from unickpt.adapters.torch import NamedOptimizer

    like = {"model": other, "optim": NamedOptimizer(into, other)}
    unickpt.load(path, like, rules=Rules.preset("dcp"))
    for ours, theirs in zip(other.parameters(), module.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert into.state[ours].keys() == optimizer.state[theirs].keys()
        for slot, value in optimizer.state[theirs].items():
            assert torch.equal(into.state[ours][slot], value)
    assert [group["lr"] for group in into.param_groups] == [0.1, 0.2]


def llama_tree(sizes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    module = module_of(sizes, torch.float32)
    return {"model": module, "optim": optimizer_of(module)}


LLAMA_OF_ONE = (
    "include megatron-llama where g=2\n"
    "lift optimizer/state/common_step as float32 <-> optim/state/{p}/step as float32"
    "  for {p} <-> model/{p}\n"
    "default optimizer/param_groups/{g...} <-> drop\n"
)


def without_mixed_precision(path: Path, into: Path, chained: bool, counted: bool) -> Path:
    """What Megatron writes without --bf16 and --fp16: its FP32Optimizer wraps nothing."""
    state, common = {}, {}
    for name, value in unickpt.open(path).items():
        if not name.startswith(("optimizer.state.fp32", "optimizer/")) and "bias" not in name:
            state[name] = torch.from_numpy(np.asarray(value[...]).astype(np.float32))
    state = {
        n.replace("optimizer.", "chained_0.optimizer.") if chained else n: x
        for n, x in state.items()
        if "/" not in n
    }
    into.mkdir()
    saved = save(state, into / "c", flatten=False)
    group: dict[str, Any] = {"lr": 1.0, "wd_mult": 0.0}
    common = {"param_groups": [{**group, "step": 4}] if counted else [group, group]}
    if not counted:
        common["state"] = {"common_step": torch.tensor(4.0)}
    torch.save(
        {"iteration": 4, "optimizer": {0: common, 1: common} if chained else common},
        saved / "common.pt",
    )
    (saved / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    return saved


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("counted", [False, True])
def test_without_mixed_precision(chained: bool, counted: bool, tmp_path: Path) -> None:
    first = unpacked("mc-optim-tp2-pp2", tmp_path)
    path = without_mixed_precision(first, tmp_path / "out", chained, counted)
    stored = stored_of(path)
    sizes = {name: array.shape for name, array in llama(stored).items()}
    prefix = "chained_0." if chained else ""
    for preset in ("megatron-llama", "megatron"):
        if preset == "megatron":
            sizes = {
                n: slot_of(stored, *of).shape
                for n, of in gpt(stored, False).items()
                if "optimizer." not in n
            }
        tree = llama_tree(sizes)
        given = {"g": GROUPS} if preset == "megatron-llama" else {}
        rules = Rules.preset(preset, sizes=given)
        unickpt.load(path, tree, rules=rules)
        for parameter in tree["model"].parameters():
            slots = tree["optim"].optimizer.state[parameter]
            assert slots["step"].item() == 4
        tied = tree["optim"].optimizer.state[next(iter(tree["model"].parameters()))]
        at = f"{prefix}optimizer.state.exp_avg.embedding.word_embeddings.weight"
        assert same(tied["exp_avg"], stored[at][...])


def test_lines_that_a_preset_has_as_well_count_once(tmp_path: Path) -> None:
    first = unpacked("mc-optim-tp2-pp2", tmp_path)
    path = without_mixed_precision(first, tmp_path / "out", False, False)
    tree = llama_tree({n: array.shape for n, array in llama(stored_of(path)).items()})
    unickpt.load(path, tree, rules=Rules.parse(LLAMA_OF_ONE))
    assert all(s["step"] == 4 for s in tree["optim"].optimizer.state.values())
