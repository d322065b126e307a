"""The presets `flax*`: layers of flax.linen and flax.nnx <-> torch.nn, by what they compute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unickpt
from unickpt import Rules
from unickpt.errors import RuleError

pytestmark = pytest.mark.integration

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
pytest.importorskip("flax")

import flax.linen as nn  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from flax import nnx  # noqa: E402
from support import flax_models  # noqa: E402

FLAX = Rules.preset("flax")
CONV = Rules.preset("flax-conv")
TRANSPOSED = Rules.preset("flax-conv-transpose")

V, E, F, H = 29, 10, 14, 2
TOKENS = np.random.default_rng(0).integers(0, V, (3, 11))


class Linen(nn.Module):
    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        x = nn.Embed(V, E, name="embed")(tokens)
        return nn.GroupNorm(2, epsilon=1e-5, name="groups")(Block(name="block")(x))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        y = nn.LayerNorm(epsilon=1e-5, name="before")(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=H, name="attention")(y)
        x = nn.Dense(F, name="up")(nn.RMSNorm(epsilon=1e-5, name="between")(x))
        x = nn.BatchNorm(use_running_average=True, name="batch")(x)
        return nn.Dense(E, use_bias=False, name="down")(nn.relu(x))


class Nnx(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(V, E, rngs=rngs)
        self.block = NnxBlock(rngs)
        self.groups = nnx.GroupNorm(E, num_groups=2, epsilon=1e-5, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        return self.groups(self.block(self.embed(tokens)))


class NnxBlock(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.before = nnx.LayerNorm(E, epsilon=1e-5, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(H, E, decode=False, rngs=rngs)
        self.between = nnx.RMSNorm(E, epsilon=1e-5, rngs=rngs)
        self.up = nnx.Linear(E, F, rngs=rngs)
        self.batch = nnx.BatchNorm(F, use_running_average=True, rngs=rngs)
        self.down = nnx.Linear(F, E, use_bias=False, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = x + self.attention(self.before(x))
        return self.down(nnx.relu(self.batch(self.up(self.between(x)))))


class Torch(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(V, E)
        self.block = TorchBlock()
        self.groups = torch.nn.GroupNorm(2, E)

    def forward(self, tokens: Any) -> Any:
        return self.groups(self.block(self.embed(tokens)).mT).mT


class TorchBlock(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = torch.nn.LayerNorm(E)
        self.attention = torch.nn.MultiheadAttention(E, H, batch_first=True)
        self.between = torch.nn.RMSNorm(E, eps=1e-5)
        self.up = torch.nn.Linear(E, F)
        self.batch = torch.nn.BatchNorm1d(F)
        self.down = torch.nn.Linear(F, E, bias=False)

    def forward(self, x: Any) -> Any:
        y = self.before(x)
        x = self.up(self.between(x + self.attention(y, y, y, need_weights=False)[0]))
        return self.down(self.batch(x.mT).mT.relu())


def filled(tree: Any, seed: int = 0) -> Any:
    """Random arrays; those of variances are positive."""

    def positive(path: Any, x: Any) -> Any:
        return abs(x) if "var" in jax.tree_util.keystr(path) else x

    return jax.tree_util.tree_map_with_path(positive, flax_models.fill(tree, seed))


def randomized(module: Any) -> Any:
    """A torch module with random parameters and statistics, for use."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, x in module.state_dict().items():
            if x.is_floating_point():
                random = torch.randn(x.shape, generator=generator) * 0.3 + 0.1
                x.copy_(random.abs() if "var" in name else random)
    return module.eval()


def run(module: Any, *inputs: Any) -> Any:
    with torch.no_grad():
        return module.eval()(*map(torch.tensor, inputs)).numpy()


def same(a: Any, b: Any) -> bool:
    return jax.tree.structure(a) == jax.tree.structure(b) and jax.tree.all(
        jax.tree.map(lambda x, y: np.asarray(x).tobytes() == np.asarray(y).tobytes(), a, b)
    )


def shapes(module: Any, *inputs: Any) -> Any:
    return jax.eval_shape(module.init, jax.random.key(0), *inputs)


def arrays(module: Any) -> dict[str, Any]:
    return {name: x.numpy() for name, x in module.state_dict().items()}


def check_both_ways(
    module: Any, make: Callable[[], Any], inputs: Any, rules: Rules, path: Path, last: bool = False
) -> None:
    """A module of flax.linen and one of torch compute the same, whichever is made of the other.

    Arguments:
        module: of flax.linen.
        make: makes one of torch.
        inputs: of both.
        rules: relate them.
        path: a folder.
        last: whether torch's channels come first, and flax's last.
    """
    move = (lambda x, a, b: np.moveaxis(x, a, b)) if last else (lambda x, a, b: x)
    theirs = [move(x, -1, 1) for x in inputs]

    variables = filled(shapes(module, *inputs))
    unickpt.save(path / "flax", variables)
    made = make()
    unickpt.load(path / "flax", made, rules=rules)
    assert_close(move(run(made, *theirs), 1, -1), module.apply(variables, *inputs))
    unickpt.save(path / "flax_made", made.state_dict())
    back = unickpt.load(path / "flax_made", shapes(module, *inputs), rules=rules.inverse)
    assert same(back, variables)

    other = randomized(make())
    unickpt.save(path / "torch", other.state_dict())
    variables = unickpt.load(path / "torch", shapes(module, *inputs), rules=rules.inverse)
    assert_close(module.apply(variables, *inputs), move(run(other, *theirs), 1, -1))
    unickpt.save(path / "torch_made", variables)
    again = make()
    unickpt.load(path / "torch_made", again, rules=rules)
    assert same(arrays(again), arrays(other))


def assert_close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


# --- a whole model ------------------------------------------------------------------------------


def test_linen(tmp_path: Path) -> None:
    check_both_ways(Linen(), Torch, [TOKENS], FLAX, tmp_path)


def test_nnx(tmp_path: Path) -> None:
    graph, abstract = nnx.split(nnx.eval_shape(Nnx))
    state = filled(abstract)
    unickpt.save(tmp_path / "nnx", {"params": state})
    made = Torch()
    unickpt.load(tmp_path / "nnx", made, rules=FLAX)
    assert_close(run(made, TOKENS), nnx.merge(graph, state)(TOKENS))

    unickpt.save(tmp_path / "torch", made.state_dict())
    back = unickpt.load(tmp_path / "torch", {"params": abstract}, rules=FLAX.inverse)
    assert same(back["params"], state)


def test_a_train_state_in_a_tree(tmp_path: Path) -> None:
    """`under` says where the two sides lie."""
    rules = Rules.parse("include flax under state/ <-> model/")
    variables = filled(shapes(Linen(), TOKENS))
    unickpt.save(tmp_path / "flax", {"state": variables})
    made = {"model": Torch()}
    unickpt.load(tmp_path / "flax", made, rules=rules)
    assert_close(run(made["model"], TOKENS), Linen().apply(variables, TOKENS))


def test_batches_are_counted_anew(tmp_path: Path) -> None:
    """Nothing of flax counts them: what torch has counted is left out, and begins with 0."""
    model = randomized(Torch())
    model.block.batch.num_batches_tracked.fill_(5)
    unickpt.save(tmp_path / "torch", model.state_dict())
    variables = unickpt.load(tmp_path / "torch", shapes(Linen(), TOKENS), rules=FLAX.inverse)
    unickpt.save(tmp_path / "flax", variables)
    unickpt.load(tmp_path / "flax", model, rules=FLAX)
    assert model.block.batch.num_batches_tracked == 0


class Across(torch.nn.Module):
    """Attention to keys and values of other widths, for which torch has other parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.across = torch.nn.MultiheadAttention(E, H, kdim=7, vdim=9, batch_first=True)

    def forward(self, *inputs: Any) -> Any:
        return self.across(*inputs, need_weights=False)[0]


class LinenAcross(nn.Module):
    @nn.compact
    def __call__(self, *inputs: Any) -> Any:
        return nn.MultiHeadDotProductAttention(num_heads=H, name="across")(*inputs)


def test_attention_to_other_widths(tmp_path: Path, rng: np.random.Generator) -> None:
    inputs = [rng.standard_normal((3, n, e), np.float32) for n, e in ((4, E), (6, 7), (6, 9))]
    check_both_ways(LinenAcross(), Across, inputs, FLAX, tmp_path)


# --- convolutions -------------------------------------------------------------------------------

KERNEL, EXTENT = (2, 3, 5), (11, 13, 8)


class Layer(nn.Module):
    """A layer inside of others, under the name that `Inside` gives it."""

    layer: nn.Module

    def __call__(self, x: Any) -> Any:
        return self.layer(x)


class Inside(torch.nn.Module):
    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Any) -> Any:
        return self.layer(x)


def pixels(rank: int, channels: int) -> Any:
    rng = np.random.default_rng(rank)
    return rng.standard_normal((4, *EXTENT[:rank], channels), np.float32)


def nested(module: Any) -> Any:
    return Layer(Layer(module))


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize(("inputs", "outputs", "groups"), [(6, 9, 1), (12, 9, 3), (7, 7, 1)])
def test_conv(rank: int, inputs: int, outputs: int, groups: int, tmp_path: Path) -> None:
    ours = nn.Conv(outputs, KERNEL[:rank], padding="VALID", feature_group_count=groups)
    torch_class = getattr(torch.nn, f"Conv{rank}d")

    def make() -> Any:
        return Inside(Inside(torch_class(inputs, outputs, KERNEL[:rank], groups=groups)))

    x = [pixels(rank, inputs)]
    check_both_ways(nested(ours), make, x, FLAX + CONV, tmp_path, last=True)


def transposed(rank: int, outputs: int, **options: Any) -> Any:
    strides = (2, 3, 1)[:rank]
    return nn.ConvTranspose(outputs, KERNEL[:rank], strides, padding="VALID", **options)


def torch_transposed(rank: int, inputs: int, outputs: int) -> Any:
    torch_class = getattr(torch.nn, f"ConvTranspose{rank}d")
    return torch_class(inputs, outputs, KERNEL[:rank], stride=(2, 3, 1)[:rank])


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("outputs", [9, 6])
@pytest.mark.parametrize(("flipped", "rules"), [(False, TRANSPOSED), (True, CONV)])
def test_conv_transpose(
    rank: int, outputs: int, flipped: bool, rules: Rules, tmp_path: Path
) -> None:
    """flax slides the kernel as it is; transpose_kernel=True reverses it, as torch does."""
    ours = transposed(rank, outputs, transpose_kernel=flipped)

    def make() -> Any:
        return Inside(Inside(torch_transposed(rank, 6, outputs)))

    x = [pixels(rank, 6)]
    check_both_ways(nested(ours), make, x, FLAX + rules, tmp_path, last=True)


class UpAndDown(nn.Module):
    inner: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Conv(self.inner, (2, 3), padding="VALID", name="down")(x)
        return transposed(2, 6, name="up")(x)


def up_and_down(inner: int) -> Any:
    down, up = torch.nn.Conv2d(6, inner, (2, 3)), torch_transposed(2, inner, 6)
    modules = torch.nn.Sequential()
    modules.add_module("down", down)
    modules.add_module("up", up)
    return modules


def test_shapes_tell_what_is_transposed(tmp_path: Path) -> None:
    rules = FLAX + CONV + TRANSPOSED
    x = [pixels(2, 6)]
    check_both_ways(UpAndDown(9), lambda: up_and_down(9), x, rules, tmp_path, last=True)


def test_what_shapes_do_not_tell_is_refused(tmp_path: Path) -> None:
    """As many channels in as out: it could be either, and the user has to say it."""
    unickpt.save(tmp_path / "flax", filled(shapes(UpAndDown(6), pixels(2, 6))))
    with pytest.raises(RuleError) as raised:
        unickpt.load(tmp_path / "flax", up_and_down(6), rules=FLAX + CONV + TRANSPOSED)
    text = str(raised.value)
    assert "'params/down/kernel' (and 1 more) is taken twice" in text
    assert "preset flax-conv, line " in text
    assert "preset flax-conv-transpose, line " in text

    rules = FLAX + Rules.parse("""
        params/down/kernel [x ... i o]   <-> down.weight [o i x ...]
        params/up/kernel   [-x -... i o] <-> up.weight   [i o x ...]
    """)
    x = [pixels(2, 6)]
    check_both_ways(UpAndDown(6), lambda: up_and_down(6), x, rules, tmp_path / "said", last=True)


def test_convolutions_have_to_be_asked_for(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "flax", filled(shapes(nested(nn.Conv(5, (2, 3))), pixels(2, 4))))
    model = Inside(Inside(torch.nn.Conv2d(4, 5, (2, 3))))
    with pytest.raises(RuleError, match=r"'params/layer/layer/kernel' is float32\[2, 3, 4, 5\]"):
        unickpt.load(tmp_path / "flax", model, rules=FLAX)


# --- what does not fit --------------------------------------------------------------------------


def test_without_like_a_weight_could_be_many_things(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "torch", torch.nn.Linear(4, 5).state_dict())
    with pytest.raises(RuleError, match="'weight' is taken twice"):
        unickpt.load(tmp_path / "torch", rules=FLAX.inverse)


def test_a_weight_of_another_shape_is_told(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "flax", {"params": {"a": {"kernel": jnp.zeros((4, 5))}}})
    like = {"a.weight": np.zeros((5, 3), np.float32)}
    with pytest.raises(RuleError, match=r"i has 3 elements here, but 4"):
        unickpt.load(tmp_path / "flax", like, rules=FLAX)


def test_what_has_no_counterpart_is_told(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "flax", filled(shapes(nn.Dense(5), pixels(1, 4))))
    with pytest.raises(RuleError, match=r"'params/bias'"):
        unickpt.load(tmp_path / "flax", torch.nn.Linear(4, 5, bias=False), rules=FLAX)
