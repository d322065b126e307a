"""How long a training of Lightning waits for its checkpoints: Lightning's plugins beside unickpt's.

    python benchmarks/lightning_wait.py                       # 256 MiB of weights and AdamW's state
    python benchmarks/lightning_wait.py --mib 1024 --layers 200 --rounds 9

In each round every contender takes a turn, in an order shuffled anew. A turn is a real
`Trainer.save_checkpoint` of a trained model, and begins when nothing is in flight. Round 0 warms
up, is not counted, and checks what each contender loads. Medians of seconds.

waits: the call. all: until the checkpoint is complete. load: the call, from the page cache.
Lightning's plugins do not flush their files; so "unickpt, no flush" does not either.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import tempfile
import warnings
from pathlib import Path
from time import perf_counter
from typing import Any

COLUMNS = ("waits", "all", "load")


def main() -> None:
    """Trains a step, and saves in rounds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=256, help="with AdamW's state")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, help="where to save (default: a temporary folder)")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    contenders = make_contenders()
    times: dict[str, list[list[float]]] = {name: [] for name in contenders}
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        trainer = trained(options)
        for number in range(options.rounds + 1):
            for name in random.Random(number).sample(sorted(contenders), len(contenders)):
                path = Path(folder) / f"{number}.ckpt"
                seconds = turn(trainer, contenders[name], path, check=not number)
                if number:
                    times[name].append(seconds)
        trainer.strategy.checkpoint_io = contenders["TorchCheckpointIO"]
    report(options, times)


def make_contenders() -> dict[str, Any]:
    """The plugins, by name."""
    from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

    import unickpt
    from unickpt.integrations.lightning import UnickptCheckpointIO

    unflushed = unickpt.SaveOptions(fsync=False)
    return {
        "TorchCheckpointIO": TorchCheckpointIO(),
        "AsyncCheckpointIO": AsyncCheckpointIO(TorchCheckpointIO()),
        "unickpt": UnickptCheckpointIO(),
        "unickpt, no flush": UnickptCheckpointIO(unflushed),
        "unickpt, no flush, waits": UnickptCheckpointIO(unflushed, background=False),
    }


def trained(options: argparse.Namespace) -> Any:
    """A trainer that has made one step."""
    import lightning
    import torch

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            side = int((options.mib * (1 << 20) / 12 / options.layers) ** 0.5)
            layers = (torch.nn.Linear(side, side, bias=False) for _ in range(options.layers))
            self.net = torch.nn.Sequential(*layers)

        def training_step(self, batch: Any) -> Any:
            return self.net(torch.ones(1, self.net[0].in_features)).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    trainer = lightning.Trainer(
        max_steps=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(range(1)))
    return trainer


def turn(trainer: Any, io: Any, path: Path, check: bool) -> list[float]:
    """The times of one contender, in the order of the columns."""
    import torch

    trainer.strategy.checkpoint_io = io
    os.sync()
    start = perf_counter()
    trainer.save_checkpoint(path)
    waits = perf_counter() - start
    io.teardown()
    everything = perf_counter() - start
    start = perf_counter()
    found = trainer.strategy.load_checkpoint(path)
    load = perf_counter() - start
    if check:
        for name, tensor in trainer.lightning_module.state_dict().items():
            assert torch.equal(found["state_dict"][name], tensor), name
        assert found["global_step"] == 1
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    return [waits, everything, load]


def report(options: argparse.Namespace, times: dict[str, list[list[float]]]) -> None:
    """Prints the table."""
    import lightning
    import torch

    print(
        f"{options.mib} MiB in {options.layers} layers, {options.rounds} rounds, lightning "
        f"{lightning.__version__}, torch {torch.__version__}, {os.cpu_count()} cores; seconds, "
        "medians"
    )
    print(f"{'':26}" + "".join(f"{column:>10}" for column in COLUMNS))
    for name, rows in times.items():
        cells = "".join(f"{statistics.median(c):10.3f}" for c in zip(*rows, strict=True))
        print(f"{name:26}{cells}")


if __name__ == "__main__":
    main()
