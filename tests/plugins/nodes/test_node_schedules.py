"""Jobs on nodes by simulated schedules: what a step is said to survive, it survives."""

from __future__ import annotations

import math
import random
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from support import node_world
from support.node_world import Job, Node, Partition, Process, World, count_of, files_of

from unickpt.features import SaveCall
from unickpt.plugins.nodes import job as job_module
from unickpt.plugins.nodes import tier
from unickpt.plugins.nodes.node_steps import NodeSteps
from unickpt.runs.background_removal import Cleaning
from unickpt.runs.current_steps import Steps
from unickpt.runs.requested_removal import Removal
from unickpt.runs.retention import Retention
from unickpt.runs.step_folder import StepFolder
from unickpt.runs.step_save import StepSave
from unickpt.runs.tier_copies import IN_ROOT
from unickpt.storage.errors import Failed
from unickpt.storage.ocdbt import MANIFEST

FOUND = {
    3: "a step that was lost and saved again was lost to some processes",
    18: "no process said that a step of the root is not to be uploaded; the others waited",
    48: "process 0 removed answers of the next exchange",
    70: "a step was taken for the remains of a save, because it was committed meanwhile",
    156: "a process of a node did not list what another one had restored",
    176: "an upload that failed was removed, and counted as done later",
    271: "a root that was not mounted for a moment had no steps",
    443: "copies of an earlier job counted, whose node was lost",
}
"""Seeds of schedules without partitions that broke a promise once, and why."""
FOUND_CUT = {33: "a step was lost to a node that was cut off while others restored files"}
"""The same with partitions."""


class Schedule:
    """Some jobs of one run, one after the other, on nodes of which some are lost or stay away.

    Arguments:
        seed: decides all.
        partitions: whether nodes may be cut off from each other.
    """

    def __init__(self, seed: int, *, partitions: bool = True) -> None:
        self.world = World(seed)
        # Apart, so that those without partitions stay as they are.
        self.cuts = random.Random(f"partitions {seed}") if partitions else None
        self.random = chosen = self.world.random
        ways = ["none", "replicas", "replicas", "(8, 1)", "(2, 1)", "(16, 2)"]
        self.protection = chosen.choice(ways)
        self.upload_every = chosen.choice([1, 2, 3, 99])
        self.keep_last = chosen.choice([None, 1, 2])
        self.nodes_per_unit = chosen.choice([1, 1, 2])
        self.promises: dict[float, tuple[int, set[str]]] = {}
        """By how many units may be lost: the newest step that survives it, as was said; and which
        units were lost since."""
        self.made = self.job_steps = 0
        self.is_quiet = False
        """Whether the processes of the job are fast and see the root: then nothing may fail."""

    # --- what happens ---------------------------------------------------------------------------

    def run(self) -> list[str]:
        """Returns the promises that were broken."""
        count = self.random.choice([2, 3, 3])
        nodes = [self._new_node() for _ in range(self.random.choice([2, 2, 3, 3, 4]))]
        for number in range(count):
            self._run_job(nodes, is_last=number == count - 1)
            if self.world.failures:
                break
            nodes = self._next_nodes(nodes)
        job_module._jobs.clear()
        return self.world.failures

    def _new_node(self) -> Node:
        name = f"n{self.made}"
        node = Node(name, f"u{self.made // self.nodes_per_unit}")
        self.made += 1
        self.world.nodes[name] = node
        return node

    def _next_nodes(self, before: list[Node]) -> list[Node]:
        """The nodes of the next job; some are lost, some stay away, some come back."""
        chosen, world = self.random, self.world
        for node in chosen.sample(before, min(len(before), chosen.choice([0, 0, 1, 1, 1, 2]))):
            world.nodes.pop(node.name)
            self._is_gone(node)
        left = list(world.nodes.values())
        if len(left) > 1 and chosen.random() < 0.3:
            left.remove(chosen.choice(left))
        if not left or chosen.random() < 0.5:
            left += [self._new_node() for _ in range(chosen.randint(1, 2))]
        if len(left) < 2:
            left.append(self._new_node())
        if chosen.random() < 0.3:
            chosen.shuffle(left)
        left = left[:4]
        for node in world.nodes.values():
            node.claims.clear()
            if node not in left:
                self._is_gone(node)
        return left

    def _is_gone(self, node: Node) -> None:
        for _, units in self.promises.values():
            units.add(node.unit)

    def _run_job(self, nodes: list[Node], is_last: bool) -> None:
        chosen, world = self.random, self.world
        places = [node for node in nodes for _ in range(chosen.choice([1, 1, 1, 1, 2]))]
        job = Job(places)
        self.is_quiet = is_last or chosen.random() < 0.3
        if not self.is_quiet:
            for process in job.processes:
                if chosen.random() < 0.15:
                    process.pause_s = chosen.choice([0.01, 0.1])
                if chosen.random() < 0.1:
                    process.cut = self._cut(["hangs", "fails"])
        world.partition = None
        if self.cuts is not None and not self.is_quiet and self.cuts.random() < 0.5:
            names = sorted({node.name for node in nodes})
            side = frozenset(self.cuts.sample(names, self.cuts.randint(1, len(names))))
            start = world.now + self.cuts.uniform(0.0, 1.0)
            end = start + self.cuts.choice([0.5, 2.0, 20.0, 90.0])
            world.partition = Partition(start, end, side, self.cuts.random() < 0.7)
        world.kill_at = math.inf
        if not is_last and chosen.random() < 0.85:
            world.kill_at = world.count + chosen.randint(1, 120 * len(places))
        for process in job.processes:
            world.start(process, lambda process=process: Program(self, process).run())
        world.run()
        job.is_dead = True
        if self.is_quiet and job.error is not None:
            world.failures.append(f"the job failed: {job.error!r}")

    def _cut(self, ways: list[str]) -> tuple[float, float, str]:
        start = self.world.now + self.random.uniform(0.0, 1.0)
        return start, start + self.random.choice([0.5, 2.0, 90.0]), self.random.choice(ways)

    # --- what was promised ----------------------------------------------------------------------

    def promise(self, step: int, losses: float) -> None:
        before = self.promises.get(losses)
        if before is None or before[0] <= step:
            self.promises[losses] = step, set()

    def check_promises(self, newest: int) -> None:
        """Checks what a job finds, and forgets what was not promised."""
        for losses, (step, lost) in list(self.promises.items()):
            if len(lost) > losses:
                del self.promises[losses]
            elif newest < step:
                self.world.failures.append(
                    f"step {step} was to survive the loss of {losses} units; {sorted(lost)} were "
                    f"lost, and the newest step is {newest}"
                )


class Program:
    """What each process does: it resumes, saves some steps, and ends.

    Arguments:
        schedule: to follow.
        process: that this is.
    """

    def __init__(self, schedule: Schedule, process: Process) -> None:
        self.schedule, self.process = schedule, process
        self.world = schedule.world
        self.errors: list[str] = []

    def run(self) -> None:
        schedule, process = self.schedule, self.process
        units = len({p.node.unit for p in process.job.processes})
        arguments: dict[str, Any] = {"upload_every": schedule.upload_every}
        arguments["unit"] = lambda: process.node.unit
        features: list[Any] = []
        self.losses = 0
        if schedule.protection == "replicas" and units > 1:
            arguments["replicas"] = self.losses = 1
        elif schedule.protection.startswith("("):
            counts = tuple(map(int, schedule.protection.strip("()").split(",")))
            features.append(SimpleNamespace(name="parity", counts=counts, filters_copies=False))
            self.losses = counts[1] if units > counts[1] else 0
        options: Any = SimpleNamespace(
            group=process, timeout_s=60.0, all_features=features, fsync=False, reuse=False,
            working_bytes=1 << 20, base=None, changed=None,
        )  # fmt: skip
        root = StepFolder(node_world.folder("", "root"))
        made = tier.join(root, f"/nodes/{process.node.name}/", arguments, options)
        self.nodes = made.folder._nodes
        self.steps = steps = Steps(root, Retention(keep_last=schedule.keep_last), made.folder)
        self.cleaning = Cleaning(steps)
        errors: Any = SimpleNamespace(add=lambda *error: self.errors.append(str(error)))
        self.copying: Any = made.copying(steps, self.cleaning, errors, options)
        none: Any = SimpleNamespace(removed=None, forget=None)
        self.removal = Removal(steps, self.cleaning, none, none, fsync=False)
        newest = self._resume()
        if not schedule.is_quiet and process.index and self.world.chance() < 0.1:
            process.cut, process.unprotected = schedule._cut(["empty"]), True
        for step in range(newest + 1, newest + 1 + schedule.job_steps):
            self._save(step)
            is_sure = not any(p.unprotected for p in process.job.processes)
            if self.losses and newest >= 0 and is_sure:
                schedule.promise(newest, self.losses)
            newest = step
            if self.world.chance() < 0.2:
                self.copying.wait()
            if self.world.chance() < 0.4:
                self._ask(step)
        self._close()

    def _resume(self) -> int:
        schedule = self.schedule
        counted = self.steps.counting()
        newest = self.process.agree(counted[-1] if counted and not self.process.index else -1)
        if not self.process.index:
            schedule.check_promises(newest)
            schedule.job_steps = self.world.random.randint(1, 3)
        for step in counted[-2:]:
            self._check(step)
            if self.world.chance() < 0.6:
                self._ask(step)
        self.process.agree(0)
        if schedule.is_quiet and counted[-1:] != ([newest] if newest >= 0 else []):
            self._failed(f"sees {counted}, process 0 {newest}")
        return newest

    def _save(self, step: int) -> None:
        process, steps = self.process, self.steps
        if self.removal.is_due:
            self.removal.before_save(process)
        call = SaveCall(step, None, {}, process.index == 0)
        save = StepSave(steps, self.cleaning, self.copying, call, False, [])
        calls, attempt = save.callbacks(), process.next_attempt()
        calls.begin()
        calls.prepare(attempt)
        location, below = steps.first.location_of(step), f"processes/{attempt}/"
        files = process.node.make(f"step_{step}/{below}{process.index:05d}")
        for name, data in files_of(attempt, process.index).items():
            self.world.operate()
            files[name] = data
        control: Any = location.store(None)  # type: ignore[arg-type]
        control.write(f"{below}record-{process.index}", b"").result()
        objects = self.world.objects["control"]
        if process.index == 0:
            records = {f"{control.prefix}{below}record-{n}" for n in range(process.count)}
            self.world.wait(lambda: records <= objects.keys())
            calls.check()
            stored = node_world.Root(location)  # type: ignore[arg-type]
            assert stored.replace(stored.read(), attempt.encode(), 60.0)
        manifest = control.prefix + MANIFEST
        self.world.wait(lambda: objects.get(manifest) == attempt.encode())
        calls.committed()
        calls.ended()
        self.schedule.promise(step, 0)
        if not self.losses:  # this job cannot protect what is newer
            for losses in {*self.schedule.promises} - {0, math.inf}:
                del self.schedule.promises[losses]

    def _ask(self, step: int) -> None:
        """What a step is said to survive."""
        has_root = self.process.cut is None or self.process.cut[2] != "empty"
        if not has_root or step not in self.steps.first.committed():
            return
        text = self.copying.survives(step)
        if text == IN_ROOT:
            self.schedule.promise(step, math.inf)
        elif text.startswith("the loss of"):
            word = text.split()[3]
            self.schedule.promise(step, 1 if word == "a" else int(word))

    def _close(self) -> None:
        self.copying.wait()
        self.cleaning.wait()
        self.copying.close()
        self.cleaning.wait()
        self.process.agree(0)
        if self.schedule.is_quiet:
            for error in self.errors:
                self._failed(error)
            if self.process.unprotected:
                self._failed("could not protect a step")

    def _failed(self, text: str) -> None:
        self.world.failures.append(f"process {self.process.index}: {text}")

    # --- reading --------------------------------------------------------------------------------

    def _check(self, step: int) -> None:
        """Reads a step, as `load` does."""
        missing = "none has it"
        for folder in self.steps.holders(step):
            is_on_nodes = isinstance(folder, NodeSteps)
            version = folder.version(step)
            if version is None:
                continue
            missing = self._read(step, version.attempt, is_on_nodes)
            if not missing:
                return
        self._failed(f"step {step} cannot be read: {missing}")

    def _read(self, step: int, attempt: str, is_on_nodes: bool) -> str:
        """What a step lacks; empty if it is whole."""
        bases: list[dict[str, Any]] = []
        if is_on_nodes:
            bases = [layer["base"] for layer in self.nodes.spec(f"step_{step}")["layers"][1:]]
        for process in range(count_of(attempt)):
            base = bases[process] if is_on_nodes else None
            below = f"step_{step}/processes/{attempt}/{process:05d}/"
            files: Any = None
            if base is None or base["driver"] == "root":
                objects = self.world.objects["root"]
                size = len(below)
                files = {name[size:]: d for name, d in objects.items() if name.startswith(below)}
            elif base["driver"] == "http":
                try:
                    node, path = node_world.at(base["base_url"] + base["path"])
                except Failed:  # `load` says so
                    return ""
                files = node.files(path)
            else:
                files = self.process.node.files(base["path"].split("/", 4)[4])
            expected = files_of(attempt, process)
            for name, data in (files or {}).items():
                if expected.get(name) != data:
                    self._failed(f"step {step} is mixed: {below}{name} is {data!r}")
            if len(files or {}) < len(expected):
                return f"{below} lacks files"
        return ""


def broken(seed: int, *, partitions: bool = True) -> list[str]:
    return [f"seed {seed}: {text}" for text in Schedule(seed, partitions=partitions).run()]


@pytest.mark.parametrize("seed", FOUND)
def test_a_schedule_that_broke_a_promise_once(seed: int) -> None:
    with node_world.simulated():
        assert not broken(seed, partitions=False)


@pytest.mark.parametrize("seed", FOUND_CUT)
def test_a_schedule_with_partitions_that_broke_a_promise_once(seed: int) -> None:
    with node_world.simulated():
        assert not broken(seed)


@pytest.mark.integration  # threads that pass each other the turn, for seconds
def test_no_step_is_lost_or_mixed() -> None:
    with node_world.simulated():
        assert not [text for seed in range(200) for text in broken(seed)]


@pytest.mark.slow
@pytest.mark.parametrize("part", range(100))  # half a minute each: faulthandler's dump may crash
def test_no_step_is_lost_or_mixed_in_many_schedules(part: int) -> None:
    """All 100,000 ran on 2026-11-29, with partitions: nothing was lost or mixed."""
    with node_world.simulated():
        assert not [text for n in range(1000) for text in broken(1000 * (part + 1) + n)]


if __name__ == "__main__":
    with node_world.simulated():
        for number in range(int(sys.argv[1]), int(sys.argv[2])):
            for line in broken(number):
                print(line, flush=True)
