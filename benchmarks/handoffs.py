"""What handoff.py measures: a Llama in its checkpoints, and the ways from there into torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from contenders import Orbax, OrbaxUncompressed

RULES = """
    params/embed/embedding                 [v e]     <-> model.embed_tokens.weight                         [v e]
    params/layers/attn/query/kernel        [l e h d] <-> model.layers.{l}.self_attn.q_proj.weight          [(h d) e]
    params/layers/attn/{key|value}/kernel  [l e g d] <-> model.layers.{l}.self_attn.{k|v}_proj.weight      [(g d) e]
    params/layers/attn/out/kernel          [l h d e] <-> model.layers.{l}.self_attn.o_proj.weight          [e (h d)]
    params/layers/mlp/{gate|up}/kernel     [l e f]   <-> model.layers.{l}.mlp.{gate|up}_proj.weight        [f e]
    params/layers/mlp/down/kernel          [l f e]   <-> model.layers.{l}.mlp.down_proj.weight             [e f]
    params/layers/attn_norm/scale          [l e]     <-> model.layers.{l}.input_layernorm.weight           [e]
    params/layers/mlp_norm/scale           [l e]     <-> model.layers.{l}.post_attention_layernorm.weight  [e]
    params/norm/scale                      [e]       <-> model.norm.weight                                 [e]
    params/head/kernel                     [e v]     <-> lm_head.weight                                    [v e]
"""  # noqa: E501
HIDDEN, INNER, HEADS, KV_HEADS, HEAD = 1024, 2816, 16, 4, 64
JAX, TORCH, ORBAX, UNCOMPRESSED = "jax", "torch", "orbax", "orbax_uncompressed"
MIB = 1 << 20


@dataclass(frozen=True)
class Job:
    """A rank of a job, and what it loads.

    Arguments:
        folder: holds the checkpoints.
        config: of the model.
        rank, ranks: which one of how many.
    """

    folder: Path
    config: Any
    rank: int
    ranks: int

    def shard(self, model: Any) -> None:
        """Have FSDP2 share the model out to the ranks, layer by layer."""
        if self.ranks > 1:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh("cpu", (self.ranks,))
            for module in (*model.model.layers, model):
                fully_shard(module, mesh=mesh)

    def wait(self) -> None:
        """Wait for the other ranks."""
        if self.ranks > 1:
            import torch.distributed as dist

            dist.barrier()


class Handoff(ABC):
    """One way from a checkpoint to a model."""

    name: ClassVar[str]
    packages: ClassVar[tuple[str, ...]]
    stored: ClassVar[str]
    """The checkpoint that it reads."""

    @abstractmethod
    def start(self, job: Job) -> None:
        """Import and set up what `load` needs, outside the timing."""

    @abstractmethod
    def load(self, job: Job) -> Any:
        """A model with all its parameters."""


class ByRules(Handoff):
    """unickpt, out of the JAX checkpoint as it is."""

    name = "rules"
    packages = ("unickpt", "tensorstore", "torch", "transformers")
    stored = JAX

    def start(self, job: Job) -> None:
        import unickpt

        self.unickpt = unickpt

    def load(self, job: Job) -> Any:
        import torch
        from transformers import LlamaForCausalLM
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        with torch.device("meta"):
            model = LlamaForCausalLM(job.config)
        job.shard(model)
        self._fill(job.folder / self.stored, model)
        # Its frequencies are in no checkpoint, and were made on the meta device too.
        model.model.rotary_emb = LlamaRotaryEmbedding(job.config)
        return model.eval()

    def _fill(self, path: Path, model: Any) -> None:
        self.unickpt.load(path, model, rules=self.unickpt.Rules.parse(RULES))


class Plain(ByRules):
    """unickpt, out of a checkpoint that needs no rules."""

    name = "plain"
    stored = TORCH

    def _fill(self, path: Path, model: Any) -> None:
        self.unickpt.load(path, model)


class Today(Handoff):
    """Orbax, NumPy, safetensors and `from_pretrained`."""

    name = "today"
    packages = ("orbax-checkpoint", "jax", "tensorstore", "safetensors", "torch", "transformers")
    stored = ORBAX

    def start(self, job: Job) -> None:
        if job.rank == 0:
            import jax
            import orbax.checkpoint as ocp
            import safetensors.torch  # noqa: F401

            jax.devices()
            self.jax, self.ocp = jax, ocp

    def load(self, job: Job) -> Any:
        from transformers import LlamaForCausalLM

        directory = job.folder / "converted"
        if job.rank == 0:
            self._convert(job.folder / self.stored, directory)
            job.config.save_pretrained(directory)
        job.wait()
        model = LlamaForCausalLM.from_pretrained(directory)
        job.shard(model)
        return model

    def _convert(self, path: Path, directory: Path) -> None:
        import torch
        from safetensors.torch import save_file

        checkpointer = self.ocp.PyTreeCheckpointer()
        tree = checkpointer.metadata(path).item_metadata.tree
        to_numpy = self.ocp.RestoreArgs(restore_type=np.ndarray)
        arguments = self.jax.tree.map(lambda _: to_numpy, tree)
        restored = checkpointer.restore(path, restore_args=arguments)
        arrays = {
            name: torch.from_numpy(np.ascontiguousarray(array))
            for name, array in in_torch(restored["params"])
        }
        directory.mkdir()
        save_file(arrays, directory / "model.safetensors", metadata={"format": "pt"})


class TodayUncompressed(Today):
    """The same, of a checkpoint that is quicker to read."""

    name = "today, uncompressed"
    stored = UNCOMPRESSED


HANDOFFS: Mapping[str, type[Handoff]] = {
    kind.name: kind for kind in (ByRules, Plain, Today, TodayUncompressed)
}


def config_of(mib: int) -> Any:
    """A Llama of about so many MiB, at most a quarter of them embeddings."""
    from transformers import LlamaConfig

    vocabulary = min(32_000, 32 * mib)
    layer = HIDDEN * (2 * HEADS * HEAD + 2 * KV_HEADS * HEAD + 3 * INNER)
    rest = mib * MIB // 4 - 2 * vocabulary * HIDDEN
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=max(1, round(rest / layer)),
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD,
        tie_word_embeddings=False,
        use_cache=False,
    )


def make(mib: int, folder: Path) -> dict[str, Any]:
    """Save random numbers in all the ways that are read, and compute with them."""
    import jax
    import torch
    from transformers import LlamaForCausalLM

    import unickpt

    config = config_of(mib)
    tree = {"params": jax.tree.map(jax.numpy.asarray, flax_params(config))}
    unickpt.save(folder / JAX, tree)
    Orbax().save(folder / ORBAX, tree, durable=True)
    OrbaxUncompressed().save(folder / UNCOMPRESSED, tree, durable=True)
    params = jax.tree.map(np.asarray, tree["params"])
    arrays = {name: np.ascontiguousarray(array) for name, array in sorted(in_torch(params))}
    state = {name: torch.from_numpy(array) for name, array in arrays.items()}
    unickpt.save(folder / TORCH, state)
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict(state)
    write_logits(model, folder / "expected.npy")
    return {
        "layers": config.num_hidden_layers,
        "bytes": sum(array.nbytes for array in arrays.values()),
        "digest": digest(arrays.items()),
    }


def flax_params(config: Any) -> dict[str, Any]:
    """The parameters as Flax has them where layers are scanned."""
    n, e, f, v = config.num_hidden_layers, HIDDEN, INNER, config.vocab_size
    rng = np.random.default_rng(0)

    def kernel(*shape: int) -> dict[str, Any]:
        return {"kernel": 0.02 * rng.standard_normal(shape, np.float32)}

    def scale(*shape: int) -> dict[str, Any]:
        return {"scale": 1 + 0.1 * rng.standard_normal(shape, np.float32)}

    return {
        "embed": {"embedding": kernel(v, e)["kernel"]},
        "layers": {
            "attn": {
                "query": kernel(n, e, HEADS, HEAD),
                "key": kernel(n, e, KV_HEADS, HEAD),
                "value": kernel(n, e, KV_HEADS, HEAD),
                "out": kernel(n, HEADS, HEAD, e),
            },
            "mlp": {"gate": kernel(n, e, f), "up": kernel(n, e, f), "down": kernel(n, f, e)},
            "attn_norm": scale(n, e),
            "mlp_norm": scale(n, e),
        },
        "norm": scale(e),
        "head": kernel(e, v),
    }


def in_torch(params: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Names and views as transformers has them, written by hand as people do."""
    layers = params["layers"]
    attention, mlp = layers["attn"], layers["mlp"]
    yield "model.embed_tokens.weight", params["embed"]["embedding"]
    yield "model.norm.weight", params["norm"]["scale"]
    yield "lm_head.weight", params["head"]["kernel"].T
    for i in range(len(layers["attn_norm"]["scale"])):
        name = f"model.layers.{i}"
        for ours, theirs in (("query", "q"), ("key", "k"), ("value", "v")):
            matrix = attention[ours]["kernel"][i].reshape(HIDDEN, -1)
            yield f"{name}.self_attn.{theirs}_proj.weight", matrix.T
        matrix = attention["out"]["kernel"][i].reshape(-1, HIDDEN)
        yield f"{name}.self_attn.o_proj.weight", matrix.T
        for part in ("gate", "up", "down"):
            yield f"{name}.mlp.{part}_proj.weight", mlp[part]["kernel"][i].T
        yield f"{name}.input_layernorm.weight", layers["attn_norm"]["scale"][i]
        yield f"{name}.post_attention_layernorm.weight", layers["mlp_norm"]["scale"][i]


def touch(model: Any) -> None:
    """Have each page of the parameters in memory, which a file that is mapped has not."""
    for _, tensor in tensors_of(model):
        tensor.view(-1)[::1024].sum()


def tensors_of(model: Any, full: bool = False) -> Iterator[tuple[str, Any]]:
    """The parameters of this rank, or the whole ones, by name."""
    from torch.distributed.tensor import DTensor

    for name, tensor in sorted(model.state_dict().items()):
        if not isinstance(tensor, DTensor):
            yield name, tensor
        else:
            yield name, tensor.full_tensor() if full else tensor.to_local()


def digest_of(model: Any) -> str:
    """Of all bits of all parameters."""
    return digest((name, tensor.numpy()) for name, tensor in tensors_of(model, full=True))


def digest(arrays: Iterable[tuple[str, Any]]) -> str:
    """Of names, shapes and bits, in the order of the names."""
    import xxhash

    hasher = xxhash.xxh3_128()
    for name, array in arrays:
        hasher.update(f"{name} {array.shape} {array.dtype}".encode())
        hasher.update(array.data)
    return hasher.hexdigest()


def write_logits(model: Any, file: Path) -> dict[str, Any]:
    """Have the model compute."""
    import torch

    with torch.no_grad():
        logits = model(torch.arange(16)[None]).logits
    if not logits.isfinite().all():
        raise SystemExit("the logits are not finite")
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        np.save(file, logits.numpy())
    return {}
