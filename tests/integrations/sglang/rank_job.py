"""A rank of SGLang, without its kernels: loads a model as its model runner does, and stores the
parameters. PyPI has no build of sglang-kernel for CPUs, so no engine starts.

python rank_job.py rank world port model extra.json parameters.pt
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock


class Names(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("_"):
            raise AttributeError(name)
        return name


class WithoutTorchvision(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """SGLang imports torchvision, of which PyPI has no build for CPUs, for pictures."""

    class Module(types.ModuleType):
        def __init__(self, name: str) -> None:
            super().__init__(name)
            self.__path__ = list[str]()

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            value = Names(name, (), {}) if name[0].isupper() else MagicMock(name=name)
            setattr(self, name, value)
            return value

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return self.Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def without_torchvision() -> None:
    sys.meta_path.insert(0, WithoutTorchvision())
    find = importlib.util.find_spec
    importlib.util.find_spec = lambda name, package=None: (
        None if name.startswith("torchvision") else find(name, package)
    )


def main() -> None:
    without_torchvision()
    rank, world, port, path, extra, out = sys.argv[1:]
    import sglang.srt.distributed as distributed
    import torch
    from sglang.srt import runtime_context, server_args
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader import loader
    from sglang.srt.plugins import load_plugins

    load_plugins()
    arguments = server_args.ServerArgs(
        model_path=path, device="cpu", skip_tokenizer_init=True, dtype="float32",
        tp_size=int(world), attention_backend="torch_native",
        model_loader_extra_config=Path(extra).read_text(),
    )  # fmt: skip
    ranks = runtime_context.SpawnRanks(world_rank=int(rank))
    server_args.publish(arguments, role="scheduler", ranks=ranks)
    distributed.init_distributed_environment(
        world_size=int(world), rank=int(rank), local_rank=int(rank), backend="gloo",
        distributed_init_method=f"tcp://127.0.0.1:{port}",
    )  # fmt: skip
    distributed.initialize_model_parallel()
    config = LoadConfig(
        load_format=arguments.load_format,
        model_loader_extra_config=arguments.model_loader_extra_config,
        tp_rank=int(rank),
    )
    model_config = ModelConfig.from_server_args(arguments)
    chosen = loader.get_model_loader(config, model_config)
    try:
        model = chosen.load_model(model_config=model_config, device_config=DeviceConfig("cpu"))
        parameters = {name: each.detach().clone() for name, each in model.named_parameters()}
        torch.save({"loader": type(chosen).__name__, "parameters": parameters}, out)
    except Exception as error:
        torch.save({"error": f"{type(error).__name__}: {error}"}, out)
        if not json.loads(Path(extra).read_text()):
            raise


if __name__ == "__main__":
    main()
