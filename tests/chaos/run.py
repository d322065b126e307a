"""Runs ckpt-chaos on each integration: it kills a job at each event of its saves that it sees.

    python tests/chaos/run.py                      # all that this environment has the packages of
    python tests/chaos/run.py hf_trainer --ranks 2
    python tests/chaos/run.py --saves own          # the trainers' own saves, for comparison
    python tests/chaos/run.py ray_train --ranks 2 --killed 0 --piece 2/4   # of four shorter runs
    python tests/chaos/run.py --list

Prints a table; ends with status 1 if a point did not pass. Each job is killed, started again, and
must end with the bytes of a job that nobody killed; it fails if it goes on from an earlier step
than one that was reported as saved (jobs/target.py).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from support import ray_cluster

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
LAUNCHER = HERE / "launcher.py"
MODES = ("before", "torn", "term", "unsynced")
"""How ckpt-chaos kills. Unless asked otherwise it is in the first two."""
VERDICTS = ("PASS", "HARD_FAIL", "SILENT_DIVERGENCE", "LOST_WORK", "CONTROL_FAIL")
TIMEOUT_S = 120
LOST_WORK = 7  # exit code of jobs/target.py; by its files ckpt-chaos cannot tell


@dataclass(frozen=True)
class Job:
    """A file in jobs/, and what it needs.

    Arguments:
        title: for the table.
        package: without which it does not run.
        ranks: numbers of processes with which it runs.
        own: whether it also runs with the trainer's own saves.
        environment: of tests/environments.toml, in which it is tested.
        writers: how many of the ranks write, if not all.
        cluster: whether the job starts its ranks itself, as workers of Ray.
    """

    title: str
    package: str
    ranks: tuple[int, ...] = (1,)
    own: bool = False
    environment: str = "chaos"
    writers: int | None = None
    cluster: bool = False

    def cases(self, ranks: int | None = None) -> list[tuple[int, int]]:
        """Numbers of ranks, each with a rank to kill; `ranks` are those asked for."""
        counts = self.ranks if ranks is None else (ranks,)
        return [(n, killed) for n in counts for killed in range(min(n, self.writers or n))]


JOBS = {
    "hf_trainer": Job("Hugging Face Trainer", "transformers", (1, 2), own=True),
    "lightning_fit": Job("Lightning", "lightning", (1, 2), own=True, writers=1),
    "accelerate_loop": Job("accelerate", "accelerate", (1, 2), own=True),
    "keras_fit": Job("Keras", "keras"),
    "equinox_loop": Job("Equinox", "equinox"),
    "flax_orbax": Job("Flax NNX, Orbax's manager", "flax"),
    "jax_plain": Job("JAX", "jax", (1, 2)),
    "torch_fsdp2": Job("torch, FSDP2", "torch", (1, 2)),
    "dcp_fsdp2": Job("torch.distributed.checkpoint", "torch", (1, 2)),
    "titan": Job("torchtitan", "torchtitan", (2,), False, "torchtitan"),
    "maxtext_loop": Job("MaxText", "maxtext", (1,), False, "maxtext"),
    "deepspeed_zero": Job("DeepSpeed, ZeRO 2", "deepspeed", (2,), True, "deepspeed"),
    "megatron_core": Job("Megatron-Core", "megatron", (1, 2), False, "deepspeed"),
    "ray_train": Job("Ray Train", "ray", (1, 2), environment="ray", cluster=True),
}
# ckpt-chaos itself, of whose points it takes a part: every `of`-th, from `first`.
CHAOS = """
from ckpt_chaos import byo, cli

every, (first, of) = byo._select, {piece}
byo._select = lambda *given: every(*given)[first - 1 :: of]
raise SystemExit(cli.main())
"""
CLUSTER = """
import sys
import ray

where = ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
print(where.address_info["gcs_address"], flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True)
class Point:
    """Where a job was killed, and what came of it.

    Arguments:
        name: as ckpt-chaos tells it.
        verdict: one of `VERDICTS`.
        died: whether the job died there; the control does not.
    """

    name: str
    verdict: str
    died: bool


@dataclass(frozen=True)
class Outcome:
    """What ckpt-chaos found with a job, whose one rank was killed."""

    job: str
    ranks: int
    killed: int
    points: tuple[Point, ...]
    seconds: float

    @property
    def failed(self) -> list[Point]:
        return [each for each in self.points if each.verdict != "PASS"]

    def row(self) -> str:
        """A row of the table."""
        who = "" if self.ranks == 1 else f", {self.ranks} ranks, rank {self.killed} killed"
        passed = len(self.points) - len(self.failed)
        died = sum(each.died for each in self.points)
        verdicts = Counter(each.verdict for each in self.failed)
        wrong = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
        title = JOBS[self.job].title + who
        return f"| {title} | {died} | {passed} of {len(self.points)} | {wrong} |"


HEAD = "| job | killed | passed | did not pass |\n|---|---|---|---|"


@contextmanager
def served(job: str, folder: Path, saves: str = "unickpt") -> Iterator[list[str]]:
    """The command that runs a job in the folder `{out}`, forked from a process with its imports.

    Arguments:
        job: one of `JOBS`.
        folder: an empty one.
        saves: "unickpt", or "own" for what the trainer itself saves with.

    Raises:
        SystemExit: the job fails by itself.
    """
    at = folder / "socket"
    with ExitStack() as stack:
        log = stack.enter_context((folder / "server.log").open("w+"))
        if JOBS[job].cluster:
            stack.enter_context(cluster())
        server = subprocess.Popen(
            [sys.executable, "-W", "ignore", LAUNCHER, "serve", at, HERE / "jobs" / f"{job}.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment_of(saves, folder),
        )
        try:
            if server.stdout.readline() != b"ready\n":  # type: ignore[union-attr]
                log.seek(0)
                raise SystemExit(f"{job} does not start:\n{log.read()[-4000:]}")
            yield [sys.executable, "-S", "-E", str(LAUNCHER), str(at), "{out}"]
        finally:
            server.stdin.close()  # type: ignore[union-attr]
            server.wait()
            server.stdout.close()  # type: ignore[union-attr]


@contextmanager
def cluster() -> Iterator[None]:
    """A cluster of Ray, which `ray.init()` finds in what is started meanwhile; it outlives jobs."""
    program = [sys.executable, "-W", "ignore", "-c", CLUSTER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            program, env=environment_of("unickpt", Path(folder)), text=True, **pipes
        ) as process,
    ):
        try:
            os.environ["RAY_ADDRESS"] = process.stdout.readline().strip()  # type: ignore[union-attr]
            yield
        finally:
            del os.environ["RAY_ADDRESS"]
            process.stdin.close()  # type: ignore[union-attr]


def environment_of(saves: str, folder: Path) -> dict[str, str]:
    """The environment variables of a job; the arguments as for `served`."""
    return {
        **os.environ,
        "CHAOS_SAVES": saves,
        "CHAOS_COMPILED": str(folder / "compiled"),  # programs, for all runs of the job
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(HERE.parent))),
        "KERAS_BACKEND": "jax",
        "JAX_PLATFORMS": "cpu",
        "OMP_NUM_THREADS": "1",
        "NPROC": "32",  # threads of XLA, which collectives over gloo block
        "TOKENIZERS_PARALLELISM": "false",
        "DS_ACCELERATOR": "cpu",
        **ray_cluster.ENVIRONMENT,
    }


def run(
    command: Sequence[str],
    job: str,
    ranks: int,
    killed: int,
    work: Path,
    *,
    modes: Sequence[str] = MODES[:2],
    saves: str = "unickpt",
    most: int = 100_000,
    parallel: int = 1,
    piece: tuple[int, int] = (1, 1),
) -> Outcome:
    """Runs ckpt-chaos on a job.

    Arguments:
        command: of `served`.
        job: the same.
        ranks: how many processes it has.
        killed: which of them is killed.
        work: a new folder, in that of `served`.
        modes: how, as ckpt-chaos names it.
        saves: as for `served`.
        most: points at most; fewer than there are are taken evenly.
        parallel: how many jobs run at once.
        piece: which part of the points, from 1, of how many; each also runs the job undisturbed.

    Raises:
        SystemExit: the job fails with so many ranks, though nobody kills it.
    """
    started = time.monotonic()
    results = " ".join(f"{{out}}.result.{rank}" for rank in range(ranks))
    env = {
        **environment_of(saves, work.parent),
        "CHAOS_RANKS": str(ranks),
        "CHAOS_KILLED": str(killed),
    }
    seen = (1, 0) if JOBS[job].cluster else (ranks, killed)  # by ckpt-chaos
    # Without the variable, which 0.1.8 forgets, `--crash-rank 1` kills nobody.
    env["CKPT_CHAOS_CRASH_RANK"] = str(seen[1])
    done = subprocess.run(
        [
            *(sys.executable, "-c", CHAOS.format(piece=piece), "run"),
            *("--work", work, "--modes", ",".join(modes), "--max-points", str(most)),
            *("--ranks", str(seen[0]), "--crash-rank", str(seen[1]), "--jobs", str(parallel)),
            *("--grace", "2", "--timeout", str(TIMEOUT_S), "--result-cmd", f"cat {results}"),
            *("--step-regex", r"resumed from step (\d+)", "--fail-on", ",".join(VERDICTS[1:])),
            *("--", *command),
        ],
        env=env,
        capture_output=True,
        text=True,
    )
    points = tuple(_points(done.stdout))
    if not points:
        raise SystemExit(f"ckpt-chaos cannot run {job}:\n{(done.stdout + done.stderr)[-4000:]}")
    return Outcome(job, ranks, killed, points, time.monotonic() - started)


def _points(printed: str) -> Iterator[Point]:
    """The rows of ckpt-chaos's table."""
    ends = re.compile(rf"^(\S.*?)  +\S+  .*  ({'|'.join(VERDICTS)})((?:  \[[A-Z ]+\])*)$")
    for line in printed.splitlines():
        if (row := ends.match(line)) is not None:
            died = "[DID NOT CRASH]" not in row[3] and not row[1].startswith("no crash")
            lost = f"RAISED ExitCode{LOST_WORK} " in line
            yield Point(row[1].strip(), "LOST_WORK" if lost else row[2], died)


@contextmanager
def suppress_failure(failed: list[str]) -> Iterator[None]:
    """Goes on with the next job, and notes why this one cannot be judged."""
    try:
        yield
    except SystemExit as error:
        failed.append(str(error))


def known(names: Sequence[str] = ()) -> dict[str, Job]:
    """The jobs whose packages are there, or those that are named."""
    if names:
        return {name: JOBS[name] for name in names}
    return {name: job for name, job in JOBS.items() if importlib.util.find_spec(job.package)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("jobs", nargs="*", choices=[[], *JOBS], metavar="JOB", help=", ".join(JOBS))
    parser.add_argument("--ranks", type=int, help="only with so many processes")
    parser.add_argument("--killed", type=int, help="only jobs whose rank of this number is killed")
    parser.add_argument("--piece", default="1/1", help="K/N: the K-th of N parts of the points")
    parser.add_argument("--saves", choices=("unickpt", "own"), default="unickpt")
    parser.add_argument("--modes", default=",".join(MODES[:2]), help="as for `ckpt-chaos run`")
    parser.add_argument("--most", type=int, default=100_000, help="points of a job at most")
    parser.add_argument("--parallel", type=int, default=1, help="jobs at once")
    parser.add_argument("--keep", type=Path, help="a new folder for all that the jobs leave")
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args()
    jobs = {k: job for k, job in known(given.jobs).items() if given.saves != "own" or job.own}
    if given.list:
        print("\n".join(f"{name:16} {job.title}" for name, job in JOBS.items()))
        return 0
    print(HEAD, flush=True)
    failed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="chaos-") as temporary:
        how = {"modes": given.modes.split(","), "saves": given.saves}
        first, of = map(int, given.piece.split("/"))
        counts = {"most": given.most, "parallel": given.parallel, "piece": (first, of)}
        for name, job in jobs.items():
            folder = (given.keep or Path(temporary)) / name
            folder.mkdir(parents=True)
            with suppress_failure(failed), served(name, folder, given.saves) as command:
                for ranks, killed in job.cases(given.ranks):
                    if given.killed not in (None, killed):
                        continue
                    work = folder / f"{ranks}-{killed}"
                    outcome = run(command, name, ranks, killed, work, **how, **counts)
                    print(outcome.row(), flush=True)
                    failed += [f"{name}, rank {killed} of {ranks}: {p}" for p in outcome.failed]
    print("\n".join(["", *failed]))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
