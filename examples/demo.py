"""The demo: training runs go from JAX through PyTorch back to JAX.

    python examples/demo.py [--keep DIRECTORY]

A small transformer is trained in JAX on a 2x4 mesh, and saved. PyTorch loads model and optimizer
into DTensors with another sharding, and saves them. JAX loads that on a 4x2 mesh and trains on.
The losses must equal, to the last bit, those of the first job, which was never interrupted: it
went on in memory, on the same 4x2 mesh. The jobs are real ones, of two and of four processes.

Then a Llama that JAX trained becomes transformers' LlamaForCausalLM, through rules: see handoff.py.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from handoff import handoff
from jobs import DemoFailed, headline, run_job, say

import unickpt

SHOWN = (
    "model/token/embedding",
    "model/layers/0/attn/query/kernel",
    "opt_state/0/mu/layers/0/up/kernel",
    "opt_state/0/nu/norm/scale",
)

Event = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description="JAX -> PyTorch -> JAX, bit for bit.")
    parser.add_argument("--keep", type=Path, help="keep checkpoints and logs in this new directory")
    keep = parser.parse_args().keep
    try:
        if keep is not None:
            keep.mkdir(parents=True)
            demo(keep.resolve())
        else:
            with tempfile.TemporaryDirectory(prefix="unickpt-demo-") as directory:
                demo(Path(directory))
    except (DemoFailed, FileExistsError) as error:
        sys.exit(f"\nThe demo failed: {error}")


def demo(directory: Path) -> None:
    """Runs the whole demo in a directory."""
    began = time.perf_counter()
    from_jax, from_torch = directory / "from_jax", directory / "from_torch"
    witness: dict[str, str] = {}  # fingerprints of the arrays as the first job held them

    print(f"unickpt {unickpt.__version__}: JAX -> PyTorch -> JAX on {os.cpu_count()} CPU cores")
    headline(1, "JAX trains and saves: 2 processes, 4 devices each")
    uninterrupted = run_demo_job(
        directory / "job_1", 2, witness, "jax_job.py", "train", "--save", str(from_jax)
    )

    headline(2, "What is in the checkpoint: read without any framework")
    show_arrays(from_jax)
    check_digests(from_jax)

    headline(3, "PyTorch loads it into DTensors, sharded in another way, and saves: 4 gloo ranks")
    run_demo_job(
        directory / "job_2", 4, witness,
        "torch_job.py", "--load", str(from_jax), "--save", str(from_torch),
    )  # fmt: skip
    show_arrays(from_torch)
    check_digests(from_torch)

    headline(4, "JAX loads what PyTorch saved, and trains on: 2 processes, 4 devices each")
    resumed = run_demo_job(
        directory / "job_3", 2, witness, "jax_job.py", "resume", "--load", str(from_torch)
    )

    headline(5, "Losses of the run that never stopped, and of the one through PyTorch")
    compare_losses(uninterrupted, resumed)
    handoff(directory / "handoff", 6)
    print(f"\nAll of it took {time.perf_counter() - began:.0f} s.")


# --- jobs ---------------------------------------------------------------------------------------


def run_demo_job(
    directory: Path, processes: int, witness: dict[str, str], script: str, *arguments: str
) -> list[Event]:
    """Runs a script of the demo in several processes, tells what they report, and returns it.

    Raises:
        JobFailed: see `run_job`.
        DemoFailed: an array is not what it was.
    """
    directory.mkdir()
    events = directory / "events"
    events.touch()
    told: list[Event] = []

    def look() -> None:
        for line in events.read_text().split("\n")[len(told) : -1]:
            told.append(json.loads(line))
            tell(told[-1], witness)

    environment = {"DEMO_REPORT": str(events)}
    run_job(directory, processes, script, *arguments, environment=environment, look=look)
    return told


# --- what a person reads ------------------------------------------------------------------------


def tell(event: Event, witness: dict[str, str]) -> None:
    """Tells one event of a job; fingerprints are compared with those of the first job.

    Raises:
        DemoFailed: an array is not what it was.
    """
    match event:
        case {"event": "start", "parameters": parameters, "corpus": corpus, "mesh": mesh}:
            say(f"{parameters / 1e6:.1f} million parameters on the mesh {mesh_text(mesh)}")
            say(f"training data: {corpus / 1e6:.1f} MB of Python's standard library, as bytes")
        case {"event": "start", "mesh": mesh}:
            say(f"on the mesh {mesh_text(mesh)}")
        case {"event": "loss", "step": step, "loss": loss, "seconds": seconds}:
            if step % 4 == 3:
                say(f"step {step:2}   loss {loss:.4f}   {seconds:.1f} s per step")
        case {"event": "saved", "arrays": arrays, "bytes": nbytes, "seconds": seconds}:
            say(f"saved {arrays} arrays, {rate(nbytes, seconds)}, flushed to the disk")
        case {"event": "loaded", "step": step, "bytes": nbytes, "seconds": seconds}:
            say(f"loaded step {step}, {rate(nbytes, seconds)}, every digest checked")
        case {"event": "resharded", "mesh": mesh}:
            say(f"the job goes on, in memory, on the mesh {mesh_text(mesh)}: the uninterrupted run")
        case {"event": "fingerprints", "of": found}:
            if not witness:
                witness.update(found)
                return
            changed = [n for n in found.keys() | witness.keys() if found.get(n) != witness.get(n)]
            if changed:
                raise DemoFailed(f"these arrays have changed: {', '.join(sorted(changed))}")
            say(f"all {len(found)} arrays are bit for bit those of the first job (SHA-256)")


def mesh_text(mesh: dict[str, int]) -> str:
    return " x ".join(f"{name}={size}" for name, size in mesh.items())


def rate(nbytes: int, seconds: float) -> str:
    return f"{nbytes / 1e6:.0f} MB in {seconds:.2f} s ({nbytes / 1e9 / seconds:.2f} GB/s)"


def show_arrays(path: Path) -> None:
    """Shows how some arrays were split over the processes that saved them."""
    checkpoint = unickpt.open(path)
    say(f"{'array':35}{'dtype':10}{'shape':14}{'split over':26}pieces")
    for name in SHOWN:
        array = checkpoint[name]
        assert array.layout is not None, "every array of the demo lies on a mesh"
        split = ", ".join("+".join(axes) or "-" for axes in array.layout.dims)
        pieces = Counter("x".join(map(str, box.shape)) for box, _ in array.fragments)
        text = ", ".join(f"{count} of {shape}" for shape, count in pieces.items())
        shape = "x".join(map(str, array.shape))
        say(f"{name:35}{array.dtype.name:10}{shape:14}{split:26}{text}")
    say(f"and {len(checkpoint) - len(SHOWN)} others")


def check_digests(path: Path) -> None:
    """Reads every chunk of a checkpoint and checks it.

    Raises:
        DemoFailed: a chunk is damaged.
    """
    found = unickpt.verify(path)
    if not found.ok:
        raise DemoFailed(f"{path} is damaged: {', '.join(map(str, found.damage))}")
    say(f"verified {found.chunks} chunks, {rate(found.bytes, found.seconds)}")


def compare_losses(uninterrupted: list[Event], resumed: list[Event]) -> None:
    """Prints the losses after the save side by side.

    Raises:
        DemoFailed: one differs.
    """
    saved = [event["event"] for event in uninterrupted].index("saved")
    expected = losses(uninterrupted[saved:])
    found = losses(resumed)
    say("step   never stopped   through PyTorch")
    for step in sorted(expected.keys() | found.keys()):
        one, other = expected.get(step), found.get(step)
        # Nine digits tell any two float32 numbers apart.
        left, right = ("-" if loss is None else f"{loss:.9g}" for loss in (one, other))
        say(f"{step:4}   {left:13}   {right:15}   {'equal' if one == other else 'DIFFERENT'}")
    if expected != found:
        raise DemoFailed("the losses differ")
    say("every loss is the same, to the last bit")


def losses(events: list[Event]) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in events if event["event"] == "loss"}


if __name__ == "__main__":
    main()
