"""A training loop of a mixture of experts: what saving some experts at a time costs, and what
restarting with older ones does to the loss.

    python benchmarks/moe_loop.py                     # both
    python benchmarks/moe_loop.py overhead --rounds 7 --every 8
    python benchmarks/moe_loop.py overhead --sleep 0.3  # steps that need no CPU, as on a GPU
    python benchmarks/moe_loop.py losses --seeds 3

The model is like Mixtral, small and on the CPU: attention, 8 experts in each layer of which a token
goes to 2, AdamW. `overhead`: loops without saves, with `torch.save` and a full save of ours, for
both of which the loop waits, and with a save of 1 of 8 experts of each layer in the background, of
which the copies are made in the call, or while the next step runs up to its update; in turns, no
fsync, medians of the rounds. The overhead of a save is by how much a loop with saves is
longer than that without, in the same round; *call* is how long the loop stood still in the call.

`losses`: a job is killed with SIGKILL, and another goes on from its newest step, in which some
experts of each layer are as of earlier saves; then the loss on held-out data, beside that of a run
that was never killed. PLT is the proportion of lost tokens (docs/experts.md).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import unickpt
from unickpt import Checkpointer, Experts, SaveOptions
from unickpt.adapters.torch import NamedOptimizer, RouterTokens
from unickpt.types import PendingSave

KEY = "**/layers/{l}/experts/{x}/**"
EXPERTS, VOCABULARY, LENGTH = 8, 64, 64


# --- the model ------------------------------------------------------------------------------------


class Expert(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.w2 = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True, bias=False)
        self.gate = nn.Linear(width, EXPERTS, bias=False)
        self.experts = nn.ModuleDict({str(x): Expert(width, inner) for x in range(EXPERTS)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        y = self.norm(x)
        x = x + self.attention(y, y, y, attn_mask=mask, is_causal=True, need_weights=False)[0]
        y = self.norm2(x).flatten(0, 1)
        weights, chosen = self.gate(y).softmax(-1).topk(2)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(y)
        for number, expert in enumerate(self.experts.values()):
            rows, at = torch.where(chosen == number)
            out = out.index_add(0, rows, expert(y[rows]) * weights[rows, at, None])
        return x + out.view_as(x)


class Model(nn.Module):
    def __init__(self, width: int, inner: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleDict({str(n): Layer(width, inner) for n in range(layers)})
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.head(self.norm(x))


def batch(step: int, size: int) -> torch.Tensor:
    """Sequences of eight sources, each a random walk of second order; the same for a step in any
    process."""
    tables = torch.randint(
        VOCABULARY, (8, VOCABULARY, 4), generator=torch.Generator().manual_seed(1)
    )
    random = torch.Generator().manual_seed(1000 + step)
    source = torch.randint(8, (size,), generator=random)
    tokens = torch.randint(VOCABULARY, (size, LENGTH + 1), generator=random)
    which = torch.multinomial(
        torch.tensor([0.7, 0.2, 0.07, 0.03]), size * LENGTH, replacement=True, generator=random
    ).view(size, LENGTH)
    for at in range(2, LENGTH + 1):
        before = (tokens[:, at - 1] + 7 * (tokens[:, at - 2] % 2)) % VOCABULARY
        tokens[:, at] = tables[source, before, which[:, at - 1]]
    return tokens


def loss_of(model: Model, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class Job:
    """A model that is trained."""

    def __init__(self, seed: int, width: int, inner: int, layers: int, size: int) -> None:
        torch.manual_seed(seed)
        self.model, self.size, self.seed = Model(width, inner, layers), size, seed
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
        named = NamedOptimizer(self.optimizer, self.model)
        self.tree = {"model": self.model, "optimizer": named}

    def step(self, number: int, before_update: Callable[[], object] = lambda: None) -> None:
        """One step, on a batch that is the same for the number in any process."""
        loss_of(self.model, batch(number + 10_000 * self.seed, self.size)).backward()
        before_update()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def held_out(self) -> float:
        self.model.eval()
        with torch.no_grad():
            found = float(loss_of(self.model, batch(-1, 256)))
        self.model.train()
        return found

    @property
    def nbytes(self) -> int:
        return 12 * sum(p.numel() for p in self.model.parameters())


# --- overhead -------------------------------------------------------------------------------------

NONE, TORCH = "no saves", "torch.save"
FULL, PARTIAL = "unickpt, all experts, waiting", "unickpt, 1 of 8 experts, in the background"
LAZY = "the same, copied while the next step runs"


def overhead(arguments: argparse.Namespace) -> None:
    """Print what saves cost."""
    job = Job(0, arguments.width, 3 * arguments.width, 4, 2)
    saves, every = arguments.saves, arguments.every
    print(f"torch {torch.__version__}, {os.cpu_count()} CPUs, {job.nbytes / 1e6:.0f} MB of state, ")
    print(f"{saves} saves, one every {every} steps, {arguments.rounds} rounds")
    seconds: dict[str, list[float]] = {}
    calls: dict[str, list[float]] = {}
    lengths = list[float]()
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        options = SaveOptions(fsync=False)
        whole = Checkpointer(f"{folder}/whole", keep_last=1, options=options)
        experts = Experts({KEY: 1})
        some = Checkpointer(f"{folder}/some", keep_last=1, options=options, experts=experts)
        lazily = replace(options, staging="lazy")
        lazy = Checkpointer(f"{folder}/lazy", keep_last=1, options=lazily, experts=experts)
        job.step(0)
        for run in (some, lazy):
            run.save(0, job.tree, wait=True)  # all experts
        number = 0
        last: list[PendingSave] = []

        def wait_staged() -> None:
            while last:
                last.pop().wait_staged()

        def of_torch() -> None:
            state = {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()}
            torch.save(state, f"{folder}/new.pt")
            os.replace(f"{folder}/new.pt", f"{folder}/torch.pt")

        ways: dict[str, Callable[[], object]] = {
            NONE: lambda: None,
            TORCH: of_torch,
            FULL: lambda: whole.save(number, job.tree, wait=True),
            PARTIAL: lambda: some.save(number, job.tree),
            LAZY: lambda: last.append(lazy.save(number, job.tree)),
        }
        for round_ in range(arguments.rounds + 1):  # the first one warms up
            at = round_ % len(ways)
            for way in list(ways)[at:] + list(ways)[:at]:
                for run in (whole, some, lazy):
                    run.wait()
                os.sync()
                called, began = 0.0, time.perf_counter()
                for at in range(saves * every):
                    number += 1
                    if at % every == 0:
                        before = time.perf_counter()
                        ways[way]()
                        called += time.perf_counter() - before
                    if arguments.sleep:
                        time.sleep(arguments.sleep)
                        wait_staged()
                    else:
                        job.step(number, wait_staged)
                took = time.perf_counter() - began
                if round_:
                    seconds.setdefault(way, []).append(took)
                    calls.setdefault(way, []).append(called / saves)
                    if way == NONE:
                        lengths.append(took / (saves * every))
        written = some.save(number + 1, job.tree).result()
        for run in (whole, some, lazy):
            run.close()
    print(f"a step takes {statistics.median(lengths) * 1e3:.0f} ms")
    print(f"{'':44}  loop  overhead of a save   call  less overhead than torch.save, all")
    over = {
        way: statistics.median(
            (mine - none) / saves for mine, none in zip(took, seconds[NONE], strict=True)
        )
        for way, took in seconds.items()
    }
    for way, took in seconds.items():
        less = [f"{1 - over[way] / over[base]:7.1%}" for base in (TORCH, FULL)]
        print(
            f"{way:44} {statistics.median(took):5.2f} s {over[way] * 1e3:12.1f} ms "
            f"{statistics.median(calls[way]) * 1e3:9.1f} ms  " + ("" if way == NONE else str(less))
        )
    print(f"a partial save writes {written.written_bytes / written.bytes:.1%} of the state")


# --- losses ---------------------------------------------------------------------------------------

SAVED_EVERY, STEPS, KILLED = 10, 240, 140


def losses(arguments: argparse.Namespace) -> None:
    """Print what restarts with older experts do to the loss."""
    print(f"killed after the save of step {KILLED} of {STEPS}, one save every {SAVED_EVERY} steps")
    print(
        "experts saved  older, of 8  oldest  PLT    loss right after  at the end  (and not killed)"
    )
    rows: dict[int, list[dict[str, Any]]] = {}
    ends = list[float]()
    for seed in range(1, arguments.seeds + 1):
        with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
            ends.append(child(folder, seed, 0, "whole")["loss"])
            for k in (8, 7, 1):
                root = Path(folder) / str(k)
                assert child(str(root), seed, k, "killed") == {}
                rows.setdefault(k, []).append(child(str(root), seed, k, "resumed"))
                shutil.rmtree(root)
    mean = statistics.mean
    for k, found in rows.items():
        print(
            f"{k:13}  {mean(r['older'] for r in found):11.1f}  "
            f"{max(r['oldest'] for r in found):6}  "
            f"{mean(r['plt'] for r in found):.2%}  {mean(r['first'] for r in found):16.4f}  "
            f"{mean(r['loss'] for r in found):10.4f}  {mean(ends):.4f}"
        )


def child(root: str, seed: int, k: int, what: str) -> dict[str, Any]:
    """Runs a job; returns what it prints, or nothing if it was killed."""
    command = [sys.executable, __file__, "job", root, str(seed), str(k), what]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if what == "killed":
        assert ended.returncode == -signal.SIGKILL, ended
        return {}
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def train(root: str, seed: int, k: int, what: str) -> None:
    """What a job does until it ends, or kills itself."""
    job = Job(seed, 64, 128, 2, 16)
    counter = RouterTokens(job.model, "layers.*.gate", top_k=2)
    first, told = 1, dict[str, Any]()
    if what == "whole":
        for number in range(1, STEPS + 1):
            job.step(number)
        print(json.dumps({"loss": job.held_out()}))
        return
    experts = Experts({KEY: k}, plt_budget=None)
    with Checkpointer(root, experts=experts, options=SaveOptions(fsync=False)) as run:
        if what == "resumed":
            _, report = run.load(job.tree, return_report=True)
            first = int(run.loaded_step or 0) + 1
            metadata = unickpt.open(run.path(first - 1)).metadata
            counter.resume(metadata)
            older = report.older_experts
            told = {
                "older": len(older) / 2,
                "oldest": max((first - 1 - step for _, _, step in older), default=0),
                "plt": metadata["unickpt"]["experts"]["plt"],
                "first": job.held_out(),
            }
        for number in range(first, STEPS + 1):
            job.step(number)
            if number % SAVED_EVERY == 0:
                wait = number == KILLED and what == "killed"
                run.save(number, job.tree, tokens=counter.tokens(), wait=wait)
                if wait:
                    os.kill(os.getpid(), signal.SIGKILL)
    print(json.dumps({**told, "loss": job.held_out()}))


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=("overhead", "losses", "job"))
    parser.add_argument("job", nargs="*", help="of a child: folder, seed, k, what it does")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--every", type=int, default=8, help="steps from one save to the next")
    parser.add_argument("--width", type=int, default=256, help="of the model")
    parser.add_argument("--sleep", type=float, default=0.0, help="seconds of a step, without CPU")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--dir", help="on the disk to measure; by default that of temporary files")
    arguments = parser.parse_args()
    if arguments.what == "job":
        root, seed, k, what = arguments.job
        train(root, int(seed), int(k), what)
        return
    if arguments.what in (None, "overhead"):
        overhead(arguments)
    if arguments.what in (None, "losses"):
        losses(arguments)


if __name__ == "__main__":
    main()
