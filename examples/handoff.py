"""The handoff: JAX trains a Llama, PyTorch tunes it under FSDP2, and JAX takes it back.

    python examples/handoff.py

train_jax.py and finetune_torch.py read each other's checkpoints directly, through llama.rules:
names, stacked layers, merged heads and the order of rotary pairs differ, and so do the optimizers'
states. Each of them trains on a little after its save; whoever takes over must repeat these losses.
"""

import re
import tempfile
from pathlib import Path

import numpy as np
from jobs import HERE, DemoFailed, headline, run_job, say

import unickpt

STEPS, FURTHER = 12, 4
# float32 sums in another order: what two runs of one model in two frameworks may differ by.
LOGITS_ATOL, LOSS_RTOL = 2e-5, 2e-5


def handoff(directory: Path, first_headline: int = 1) -> None:
    """Runs it in a new directory.

    Raises:
        DemoFailed: logits or losses differ, or a process failed.
    """
    directory.mkdir()
    jax, torch, back = directory / "jax", directory / "torch", directory / "back"
    rules = unickpt.Rules.load(HERE / "llama.rules")
    devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}

    headline(first_headline, "JAX trains a Llama, layers stacked, on a 2x2 mesh: 2 processes")
    in_jax = _train(
        directory / "train", 2, "train_jax.py", str(jax), "--mesh", "2", "2", environment=devices
    )
    stored = unickpt.open(jax)
    say(f"saved {len(stored)} arrays, {stored.nbytes / 1e6:.1f} MB; one of them:")
    say(f"  params/layers/attn/q/kernel {list(stored['params/layers/attn/q/kernel'].shape)}")

    headline(first_headline + 1, "PyTorch tunes it: transformers' LlamaForCausalLM, FSDP2, 4 ranks")
    in_torch = _train(directory / "tune", 4, "finetune_torch.py", str(jax), str(torch))
    tuned = unickpt.open(torch)
    name = "model/model.layers.{}.self_attn.q_proj.weight"
    say(f"read from JAX's checkpoint, saved {len(tuned)} arrays; what the array above became:")
    count = sum(name.format(i) in tuned for i in range(100))
    say(f"  {count} x {name.format('{l}')} {list(tuned[name.format(0)].shape)}")
    _compare_logits(directory / "train" / "logits.npy", directory / "tune" / "logits.npy")

    headline(first_headline + 2, "JAX takes it back, on a 4x1 mesh: 2 processes")
    again = _train(
        directory / "retrain", 2, "train_jax.py", str(back), "--resume", str(torch),
        "--mesh", "4", "1", environment=devices,
    )  # fmt: skip
    if set(unickpt.open(back)) != set(stored):
        raise DemoFailed("the arrays are not named as they were")
    say(f"{len(stored)} arrays again, named as at first")
    _check_round_trip(jax, directory / "there", directory / "again", rules)

    headline(first_headline + 3, "Losses across the handoffs")
    _compare("JAX went on", in_jax, "PyTorch took over", in_torch)
    _compare("PyTorch went on", in_torch, "JAX took over", again)


def _train(
    directory: Path, processes: int, *command: str, environment: dict[str, str] | None = None
) -> dict[int, float]:
    """The losses of a job by step."""
    directory.mkdir()
    steps = ("--steps", str(STEPS), "--further", str(FURTHER))
    options = (*steps, "--logits", str(directory / "logits.npy"))
    printed = run_job(directory, processes, *command, *options, environment=environment)
    found = re.findall(r"^step (\d+) loss ([\d.]+)$", printed, re.M)
    losses = {int(step): float(loss) for step, loss in found}
    first, last = min(losses), max(losses)
    say(f"step {first} loss {losses[first]:.4f}  ...  step {last} loss {losses[last]:.4f}")
    return losses


def _check_round_trip(source: Path, there: Path, again: Path, rules: unickpt.Rules) -> None:
    """Converts a checkpoint to the other side and back: every bit must be the same.

    Raises:
        DemoFailed: one differs.
    """
    unickpt.convert(source, there, rules=rules)
    unickpt.convert(there, again, rules=rules.inverse)
    if unickpt.diff(source, again).differences:
        raise DemoFailed("JAX's checkpoint, converted there and back, is not what it was")
    say("JAX's checkpoint, converted there and back without any framework: every bit the same")


def _compare_logits(one: Path, other: Path) -> None:
    a, b = np.load(one), np.load(other)
    apart = float(np.abs(a - b).max())
    if not apart < LOGITS_ATOL:
        raise DemoFailed(f"the logits differ by {apart}")
    say(f"logits of JAX and of PyTorch differ by at most {apart:.1e}, and lie within "
        f"{np.abs(a).max():.1f}")  # fmt: skip


def _compare(one: str, before: dict[int, float], other: str, after: dict[int, float]) -> None:
    say(f"step   {one:16} {other}")
    both = sorted(before.keys() & after.keys())
    if not both:
        raise DemoFailed("the runs have no step in common")
    for step in both:
        say(f"{step:4}   {before[step]:<16.6f} {after[step]:.6f}")
        if abs(before[step] - after[step]) > LOSS_RTOL * before[step]:
            raise DemoFailed(f"the losses of step {step} differ")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="unickpt-handoff-") as folder:
        handoff(Path(folder) / "handoff")
