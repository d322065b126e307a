"""Loading vLLM's model from checkpoints of any system, beside vLLM's own loader of safetensors.

    python tests/environments.py zoo-vllm -- -k nothing    # sets the environment up
    PYTHONPATH=.:tests .venvs/zoo-vllm/bin/python benchmarks/serving.py --mib 512 --rounds 5

A Llama in bfloat16 (float32 for ZeRO 3, whose masters are cast) is saved by each system. In every
round, all loaders take a turn in one process, in an order shuffled anew, with the files in the page
cache. Timed is `load_weights`, which reads and fills the parameters, without making the model.
Their memory was touched before, since a virtual machine may have to get it from its host.
Round 0 is not counted, and compares all parameters. Written and read bytes are from /proc/self/io.

Give it an idle machine, or start it by `chrt -r 1` (`nice` has little effect between sessions of
Linux): the threads of vLLM's copies wait for each other, so other work slows it more than unickpt.
If processes of others begin or end meanwhile, compare processor time. On two cores, 64 MiB (48 of
weights) from unickpt took 11 ms: opening 1.1, the recorded `load_weights` 1.7, comparing 0.7,
reading 7, of which hashing is 1, and the end 0.7. vLLM took 7: copying from mapped files takes 3.6
of them. unickpt maps none: if one is truncated meanwhile, the process is killed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
import transformers
from support.served_checkpoints import SAVES

import unickpt
from unickpt.plugins.seal import seal

THEIRS = "vLLM, safetensors"
SEALED = "unickpt, hf, sealed"


def new_model(mib: int) -> Any:
    """A Llama of that size."""
    width, words = 1024, 4096
    layer = 2 * (4 * width * width + 3 * width * 4 * width)
    layers = max(1, ((mib << 20) - 2 * 2 * words * width) // layer)
    config = transformers.LlamaConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=8, head_dim=128,
        num_key_value_heads=8, intermediate_size=4 * width, vocab_size=words,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).bfloat16()


def configuration(model: Any, folder: Path) -> str:
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    return str(folder)


def io_bytes() -> tuple[int, int]:
    """Read and written until now, by calls of the operating system."""
    facts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(facts["rchar"]), int(facts["wchar"])


class Engine:
    """vLLM's model, as its worker loads it.

    Arguments:
        folder: with the configuration.
        load_format: of vLLM.
        settings: of the loader.
    """

    def __init__(self, folder: str, load_format: str, settings: dict[str, Any]) -> None:
        from vllm.engine.arg_utils import EngineArgs

        arguments = EngineArgs(
            folder, load_format=load_format, model_loader_extra_config=settings,
            skip_tokenizer_init=True, enforce_eager=True, max_model_len=64,
        )  # fmt: skip
        self.config = arguments.create_engine_config()

    def load(self) -> tuple[float, float, int, int, dict[str, str]]:
        """Loads; the seconds, those of all cores, the bytes that were read and written, and digests
        of parameters."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader import get_model_loader
        from vllm.utils.torch_utils import set_default_torch_dtype

        loader, model_config = get_model_loader(self.config.load_config), self.config.model_config
        with set_current_vllm_config(self.config), set_default_torch_dtype(model_config.dtype):
            model = loader.create_model(vllm_config=self.config, model_config=model_config)
            for parameter in model.parameters():
                parameter.data.zero_()
            before, began, cpu = io_bytes(), time.perf_counter(), time.process_time()
            loader.load_weights(model, model_config)
            seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
            after = io_bytes()
        digests = {
            name: hashlib.sha256(parameter.detach().view(torch.uint8).numpy()).hexdigest()
            for name, parameter in model.named_parameters()
            if self.compares
        }
        self.config.compilation_config.static_forward_context.clear()  # else it keeps the model
        return seconds, cpu, after[0] - before[0], after[1] - before[1], digests

    compares = True


def start(config: Any) -> None:
    """One rank."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    file = tempfile.mktemp()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{file}", 0, "gloo")
        initialize_model_parallel(1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--systems", nargs="*", choices=SAVES, default=list(SAVES))
    parser.add_argument("--folder", help="on the disk to measure")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="serving-") as folder:
        times = measure(Path(folder), arguments)
    base, cpu_base = (statistics.median(row[i] for row in times[THEIRS]) for i in (0, 1))
    print(f"unickpt {unickpt.__version__}, {arguments.mib} MiB, medians of {arguments.rounds}")
    for name, rows in times.items():
        seconds, cpu = (statistics.median(row[i] for row in rows) for i in (0, 1))
        ratios = [row[0] / other[0] for row, other in zip(rows, times[THEIRS], strict=True)]
        print(
            f"{name:30} {seconds:8.4f} s {seconds / base:6.2f}x "
            f"(rounds {min(ratios):.2f} to {max(ratios):.2f}), "
            f"of all cores {cpu:7.4f} s {cpu / cpu_base:5.2f}x, "
            f"read {rows[0][2] / 2**20:7.0f} MiB, written {max(row[3] for row in rows)} bytes"
        )


def measure(folder: Path, arguments: argparse.Namespace) -> dict[str, list[Any]]:
    from unickpt.integrations.vllm import register

    register()
    model = new_model(arguments.mib)
    config = configuration(model, folder / "config")
    engines = dict[str, Engine]()
    for system in dict.fromkeys(["hf", *arguments.systems]):
        path, work = folder / system.replace(" ", "-"), folder / "work"
        work.mkdir()
        settings = {"path": str(path), **SAVES[system](model, path, work)}
        for file in work.rglob("*"):
            if file.is_file():
                file.unlink()
        for file in sorted(work.rglob("*"), reverse=True):
            file.rmdir()
        work.rmdir()
        engines[f"unickpt, {system}"] = Engine(config, "unickpt", settings)
        if system == "unickpt":
            unverified = {**settings, "verify": False}
            engines[f"unickpt, {system}, verify=False"] = Engine(config, "unickpt", unverified)
    (folder / "sealed").mkdir()
    for file in (folder / "hf").iterdir():
        (folder / "sealed" / file.name).hardlink_to(file)
    seal(folder / "sealed")
    settings = {"path": str(folder / "sealed"), "hints": {"sealed": True}}
    engines[SEALED] = Engine(config, "unickpt", settings)
    engines[THEIRS] = Engine(str(folder / "hf"), "safetensors", {})
    del model
    os.sync()
    start(engines[THEIRS].config)
    times: dict[str, list[Any]] = {name: [] for name in engines}
    for number in range(arguments.rounds + 1):
        Engine.compares = number == 0
        loaded = {}
        for name in random.sample(list(engines), len(engines)):
            loaded[name] = engines[name].load()
            if number:
                times[name].append(loaded[name])
        for name, (*_, digests) in loaded.items():
            assert digests == loaded[THEIRS][-1], f"{name} differs"
    return times


if __name__ == "__main__":
    main()
