"""The policies of unickpt.integrations.orbax decide as Orbax's own."""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

pytest.importorskip("jax")
theirs = pytest.importorskip("orbax.checkpoint.experimental.v1").training
from unickpt.integrations.orbax import options, policies  # noqa: E402
from unickpt.integrations.orbax import v1 as ours  # noqa: E402

pytestmark = pytest.mark.integration  # imports Orbax


@dataclass(frozen=True)
class Info:
    step: int
    time: datetime
    metrics: Any


def histories(number: int) -> list[list[Info]]:
    """Runs with irregular steps and times; some steps have no metrics, and equal ones occur."""
    found = []
    chance = random.Random(7)
    for _ in range(number):
        now, step, infos = datetime.now(UTC) - timedelta(seconds=500), 0, []
        for _ in range(chance.randrange(12)):
            step += chance.choice([1, 2, 3, 5, 10])
            now += timedelta(seconds=chance.choice([1, 20, 60]))
            metrics = None if chance.random() < 0.2 else {"loss": chance.randrange(4)}
            infos.append(Info(step, now, metrics))
        found.append(infos)
    return found


def loss(metrics: Any) -> float:
    return float(metrics["loss"])


PRESERVATION = [
    lambda p: p.PreserveAll(),
    lambda p: p.LatestN(3),
    lambda p: p.LatestN(None),
    lambda p: p.LatestDuration(timedelta(seconds=200)),
    lambda p: p.EveryNSeconds(45),
    lambda p: p.EveryNSteps(5),
    lambda p: p.EveryNSteps(4, exact_interval=False, max_to_keep=2),
    lambda p: p.EveryNStepsClosest(10),
    lambda p: p.EveryNStepsClosest(4, max_to_keep=2),
    lambda p: p.CustomSteps([3, 5, 8]),
    lambda p: p.BestN(get_metric_fn=loss, n=2),
    lambda p: p.BestN(get_metric_fn=loss, n=3, reverse=True),
    lambda p: p.BestN(get_metric_fn=loss, n=1, keep_checkpoints_without_metrics=False),
    lambda p: p.AnyPreservationPolicy([p.LatestN(1), p.EveryNSteps(10)]),
]


@pytest.mark.parametrize("number", range(len(PRESERVATION)))
def test_which_steps_are_kept(number: int) -> None:
    make = PRESERVATION[number]
    own, other = make(ours.training.preservation_policies), make(theirs.preservation_policies)
    context = policies.PreservationContext()
    seen = set()
    for infos in histories(300):
        wanted = list(other.should_preserve(infos, context=context))
        assert own.should_preserve(infos, context=context) == wanted, infos
        seen |= set(wanted)
    assert True in seen


SAVING = [
    lambda p: p.FixedIntervalPolicy(3),
    lambda p: p.SpecificStepsPolicy(range(2, 60, 3)),
    lambda p: p.InitialSavePolicy(),
    lambda p: p.PreemptionCheckpointingPolicy(),
    lambda p: p.ContinuousCheckpointingPolicy(),
    lambda p: p.ContinuousCheckpointingPolicy(minimum_interval_secs=30),
    lambda p: p.AnySavePolicy([p.FixedIntervalPolicy(5), p.InitialSavePolicy()]),
]


@pytest.mark.parametrize("number", range(len(SAVING)))
def test_when_is_saved(number: int) -> None:
    make = SAVING[number]
    own, other = make(ours.training.save_decision_policies), make(theirs.save_decision_policies)
    seen = set()
    for infos in histories(60):
        now = Info(infos[-1].step + 1 if infos else 1, datetime.now(UTC), None)
        for flags in ((False, False), (True, False), (False, True)):
            context = policies.DecisionContext(
                is_saving_in_progress=flags[0], reached_preemption=flags[1]
            )
            wanted = other.should_save(now, infos, context=context)
            assert own.should_save(now, infos, context=context) == wanted, (infos, flags)
            seen.add(wanted)
    assert seen == {True, False}


def test_the_options_are_orbaxs_own_with_its_defaults() -> None:
    import dataclasses

    import orbax.checkpoint as ocp

    names = {each.name for each in dataclasses.fields(ocp.CheckpointManagerOptions)}
    assert names <= {each.name for each in dataclasses.fields(options.CheckpointManagerOptions)}
    options.check(ocp.CheckpointManagerOptions())
    for name in names - {"multiprocessing_options", "file_options", "save_on_steps"}:
        assert getattr(options.CheckpointManagerOptions(), name) == getattr(
            ocp.CheckpointManagerOptions(), name
        ), name


@pytest.mark.parametrize(
    "given",
    [
        {"todelete_subdir": "trash"},
        {"todelete_full_path": "trash"},
        {"max_to_keep": 0},
        {"temporary_path_class": dict},
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_name(given: dict[str, Any]) -> None:
    import orbax.checkpoint as ocp

    (name,) = given
    with pytest.raises(ValueError, match=name):
        options.CheckpointManagerOptions(**given)
    with pytest.raises(ValueError, match=name):
        options.check(ocp.CheckpointManagerOptions(**given))


def test_options_within_options_are_refused_by_their_names() -> None:
    import orbax.checkpoint as ocp

    primary = ocp.options.MultiprocessingOptions(primary_host=None)
    with pytest.raises(ValueError, match=r"multiprocessing_options\.primary_host=None"):
        options.check(ocp.CheckpointManagerOptions(multiprocessing_options=primary))
    mode = ocp.options.FileOptions(path_permission_mode=0o750)
    with pytest.raises(ValueError, match=r"file_options\.path_permission_mode"):
        options.check(ocp.CheckpointManagerOptions(file_options=mode))
    waiting = ocp.AsyncOptions(barrier_sync_fn=print)
    with pytest.raises(ValueError, match=r"async_options\.barrier_sync_fn"):
        options.check(ocp.CheckpointManagerOptions(async_options=waiting))


def test_an_option_of_a_later_orbax_is_refused_unless_it_has_its_default() -> None:
    @dataclass(frozen=True)
    class Later(options.CheckpointManagerOptions):
        turbo: bool = False

    Later()
    with pytest.raises(ValueError, match="turbo=True is not known"):
        Later(turbo=True)
