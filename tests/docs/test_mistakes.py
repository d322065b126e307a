"""Wrong arguments to the public functions are answered by what is wanted, not from inside."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.processes import Processes

import unickpt
from unickpt import (
    Checkpointer,
    CheckpointNotFound,
    LoadMismatch,
    LoadOptions,
    ProcessGroup,
    Rules,
    SaveOptions,
    UnsupportedLeaf,
)
from unickpt.loading.loader import LoadArguments
from unickpt.types import Box, LocalFragments

STATE = {"w": np.arange(6.0).reshape(2, 3), "step": 3, "b": {"x": np.ones(4)}}
ONES = np.ones(4)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    unickpt.save(tmp_path / "c", {**STATE, "mine": unickpt.PerProcess(1)})
    return tmp_path / "c"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, STATE)
        checkpointer.save(2, STATE)
    return tmp_path / "run"


# --- options -------------------------------------------------------------------------------------

WANTED = r"options must be unickpt\.{}\(\.\.\.\), not of type {}"


def test_options_of_the_other_kind_are_refused(stored: Path, run: Path, tmp_path: Path) -> None:
    saving, loading = SaveOptions(), LoadOptions()
    new: Any = tmp_path / "new"
    calls: dict[str, list[Callable[[Any], Any]]] = {
        "SaveOptions": [
            lambda options: unickpt.save(new, STATE, options=options),
            lambda options: unickpt.save_async(new, STATE, options=options),
            lambda options: unickpt.convert(stored, new, options=options),
            lambda options: Checkpointer(new, options=options),
        ],
        "LoadOptions": [
            lambda options: unickpt.load(stored, options=options),
            lambda options: unickpt.load(stored, {"step": 0}, strict=False, options=options),
            lambda options: unickpt.diff(stored, stored, options=options),
            lambda options: Checkpointer(run).load(options=options),
        ],
    }
    for wanted, those in calls.items():
        other = loading if wanted == "SaveOptions" else saving
        for call in those:
            for wrong in (other, {"verify": True}):
                with pytest.raises(TypeError, match=WANTED.format(wanted, type(wrong).__name__)):
                    call(wrong)
    assert not new.exists()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SaveOptions(budget_bytes="1"), "budget_bytes='1' must be a positive number"),
        (lambda: SaveOptions(chunk_bytes=None), "chunk_bytes=None must be a positive number"),
        (lambda: SaveOptions(timeout_s=None), "timeout_s=None must be a positive number"),
        (lambda: SaveOptions(chunk_shape=3), "chunk_shape=3 must be a tuple of positive integers"),
        (lambda: SaveOptions(chunk_shape=("a",)), "must be a tuple of positive integers"),
        (lambda: SaveOptions(metrics={"loss": 1}), "metrics is of type dict, but is called"),
        (lambda: SaveOptions(group=3), "group is of type int; omit it under torch.distributed"),
        (lambda: LoadOptions(group=3), "group is of type int; omit it under torch.distributed"),
        (lambda: LoadOptions(budget_bytes="1"), "budget_bytes='1' must be a positive number"),
        (lambda: ProcessGroup("0", 1, "x"), "index='0' and count=1 must be integers"),
        (lambda: ProcessGroup(0, 1, 77), "session=77 must be a str, not int"),
        (lambda: LocalFragments(4, [(Box((0,), (4,)), ONES)]), "shape 4 must be a tuple"),
        (lambda: LocalFragments((4,), ONES), r"a fragment is a pair \(Box"),
        (lambda: LocalFragments((4,), [((0, 4), ONES)]), r"box is \(0, 4\), not a Box"),
        (lambda: LocalFragments((4,), [(Box((0,), (4,)), [1.0])]), "data is of type list"),
        (lambda: LocalFragments.flat((4,), [("0", ONES)]), "a flat range is a pair"),
        (lambda: LocalFragments.flat((4,), [(0, [1.0])]), "data is of type list"),
        (lambda: LocalFragments.flat(4, [(0, ONES)]), "shape 4 must be a tuple of integers"),
        (lambda: Rules("w <-> v"), r"Rules\.parse\(text\)"),
        (lambda: Rules.parse("a [h] <-> b [h]", sizes={"h": "3"}), "must be an integer"),
        (lambda: Rules.parse("a [h] <-> b [h]", sizes=3), "sizes must be a dict of integers"),
        (lambda: Rules.preset(None), "the name of a preset is a str, not of type NoneType"),
        (lambda: Rules.parse("a <-> b", functions=[np.exp]), "functions must be a dict"),
        (lambda: Rules.parse("a <-> b", functions={"f": np.exp}), r"pass unickpt\.Function\("),
    ],
)
def test_arguments_of_a_wrong_type(make: Callable[[], Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_numbers_of_numpy_are_numbers() -> None:
    options = SaveOptions(budget_bytes=np.int64(9), chunk_shape=(np.int32(2),), timeout_s=1e3)
    assert options.budget_bytes == 9
    assert ProcessGroup(np.int64(0), np.int64(2), "x").count == 2


# --- trees and metadata --------------------------------------------------------------------------


def test_a_class_is_no_leaf_to_load_into(stored: Path) -> None:
    with pytest.raises(UnsupportedLeaf) as caught:
        unickpt.load(stored, {"w": np.ndarray, "step": int})
    told = "not an instance of it; pass an instance, or leave it out"
    assert str(caught.value).splitlines() == [
        "`like` cannot be loaded into:",
        f"  'w': the class numpy.ndarray, {told}",
        f"  'step': the class builtins.int, {told}",
    ]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (
            {"a": {"b": np.float32(1)}},
            "metadata['a']['b'] cannot be stored in JSON: it is",
        ),
        ({"a": [0, {"c": {1}}]}, "metadata['a'][1]['c'] cannot be stored in JSON: it is {1} of"),
        ({"a": {"b": 1, 2: 3}}, "metadata['a'] has the key 2, but keys in JSON are str; use"),
        ({"a": (1, 2)}, "metadata['a'] cannot be stored in JSON: it is (1, 2) of type tuple"),
        ({"a": float("nan")}, "metadata['a'] cannot be stored in JSON: it is nan of type float"),
        ({"a": object()}, "of type object; convert it, or leave it out"),
        ({"a": "\ud800"}, "metadata['a'] cannot be stored in JSON"),
        ({"\ud800": 1}, "which is not valid Unicode text"),
        ("text", "metadata must be a dict, not of type str"),
        ([1], "metadata must be a dict, not of type list"),
    ],
)
def test_metadata_that_json_lacks_is_named(metadata: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedLeaf) as caught:
        unickpt.save(tmp_path / "c", {"w": 1}, metadata=metadata)
    assert message in str(caught.value)
    assert not (tmp_path / "c").exists()


def test_metadata_that_contains_itself_is_refused(tmp_path: Path) -> None:
    itself: dict[str, Any] = {}
    itself["a"] = {"b": itself}
    with pytest.raises(UnsupportedLeaf, match=r"metadata\['a'\]\['b'\].* it contains itself"):
        unickpt.save(tmp_path / "c", {"w": 1}, metadata=itself)


@pytest.mark.parametrize("metrics", [3, [("loss", 1)], {"loss": None}])
def test_metrics_are_a_dict_of_numbers(metrics: Any, tmp_path: Path) -> None:
    with (
        Checkpointer(tmp_path) as checkpointer,
        pytest.raises(UnsupportedLeaf, match=r"metrics must be (a dict|numbers: 'loss')"),
    ):
        checkpointer.save(1, {"w": 1}, metrics=metrics)


@pytest.mark.parametrize("like", [2, "step_2", np.ones(3)])
def test_a_like_that_is_no_tree(like: Any, run: Path) -> None:
    with pytest.raises(LoadMismatch, match=r"`like` is a single leaf .*load\(step=2\)"):
        Checkpointer(run).load(like)


# --- an opened checkpoint ------------------------------------------------------------------------


def test_the_error_of_a_name_says_where_it_is(stored: Path) -> None:
    opened = unickpt.open(stored)
    for read, message in [
        (lambda: opened["step"], r"'step' is a plain value; read it with \.values\['step'\]"),
        (lambda: opened["b"], "'b' is a container, not an array; it contains b/x"),
        (lambda: opened["mine"], r"'mine' differs by process; unickpt\.load\(path\)"),
        (lambda: opened.values["w"], r"'w' is an array; read it with checkpoint\['w'\]"),
        (
            lambda: opened.values["no"],
            "'no' is not a plain value of .*; these are step",
        ),
    ]:
        with pytest.raises(KeyError, match=message):
            read()
    assert "step" not in opened
    assert opened.values.get("w") is None
    with pytest.raises(IndexError, match=r"takes integers and slices, not array\(\[0, 1\]\)"):
        opened["w"][np.array([0, 1])]


# --- steps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["2", 2.0, -1, True])
def test_a_wrong_step_is_refused_everywhere(wrong: Any, run: Path) -> None:
    checkpointer = Checkpointer(run, save_every=2)
    for call in (
        lambda: checkpointer.load(step=wrong),
        lambda: checkpointer.path(wrong),
        lambda: checkpointer.should_save(wrong),
        lambda: checkpointer.delete(wrong),
        lambda: checkpointer.drop_later_steps(wrong),
    ):
        with pytest.raises(ValueError, match="must be an integer, at least 0"):
            call()
    assert checkpointer.loaded_step is None
    assert checkpointer.steps() == [1, 2]


def test_a_step_that_would_not_be_found_again_is_refused(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(10**18 - 1, {"w": 1}, wait=True)
        assert checkpointer.steps() == [10**18 - 1]
        with pytest.raises(ValueError, match=r"must be less than 10\*\*18"):
            checkpointer.save(10**18, {"w": 1})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keep_last": "3"}, "keep_last='3' must be an integer, at least 1"),
        ({"keep": 3}, "keep=3 must be a function of a step, or a Retention"),
        ({"save_every": "10"}, "save_every: steps='10' must be a positive number"),
        ({"experts": {"e/{x}": 1}}, "must be Experts"),
    ],
)
def test_rules_of_a_wrong_type(arguments: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        Checkpointer(tmp_path, **arguments)


def test_both_loads_take_the_same_keywords(run: Path) -> None:
    keywords = {name for name, p in signature(unickpt.load).parameters.items() if p.kind == 3}
    assert keywords == {*LoadArguments.__annotations__, "return_report"}
    with pytest.raises(TypeError, match="unexpected keyword argument 'strct'"):
        Checkpointer(run).load(strct=False)  # type: ignore[call-overload]


def test_a_checkpointer_of_a_checkpoint_says_so(stored: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="is a checkpoint, not a folder of steps"):
        Checkpointer(stored).load()


# --- paths ---------------------------------------------------------------------------------------


def not_found(path: object) -> str:
    with pytest.raises(CheckpointNotFound) as caught:
        unickpt.load(path)  # type: ignore[call-overload]
    return str(caught.value)


def test_a_path_without_a_checkpoint_says_what_is_there(run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("x")
    (tmp_path / "stopped" / "processes").mkdir(parents=True)
    assert f"nothing is there; {run} has step_1, step_2." in not_found(run / "step_3")
    above = f"{tmp_path} has empty, notes, run, stopped."
    assert f"nothing is there; {above}" in not_found(tmp_path / "Run" / "step_1")
    assert f"the folder is empty; {above}" in not_found(tmp_path / "empty")
    assert "it contains a.txt, but no checkpoint of a known format" in not_found(tmp_path / "notes")
    assert "a save began there and has not been committed" in not_found(tmp_path / "stopped")
    assert f"it is inside of the checkpoint {run}/step_1;" in not_found(run / "step_1" / "w")
    assert "it contains checkpoints but is not one itself (step_1, step_2)" in not_found(run)
    assert "no checkpoint at memory://no/such: nothing is there" in not_found("memory://no/such")
    (tmp_path / "hidden" / ".cache").mkdir(parents=True)
    told = f"nothing is there; {tmp_path / 'hidden'} has only hidden files."
    assert told in not_found(tmp_path / "hidden" / "step_1")


def test_an_optimizer_without_state_is_named(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    def job(steps: int) -> dict[str, Any]:
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(steps):
            model(torch.ones(3)).sum().backward()
            optimizer.step()
        return {"model": model, "optim": optimizer}

    unickpt.save(tmp_path / "trained", job(1))
    unickpt.save(tmp_path / "fresh", job(0))
    fresh = {name: value.state_dict() for name, value in job(0).items()}
    with pytest.raises(LoadMismatch, match=r"has nothing under 'optim/state/': a state_dict\(\)"):
        unickpt.load(tmp_path / "trained", fresh)
    with pytest.raises(LoadMismatch, match="nothing is stored under 'optim/state/', as before"):
        unickpt.load(tmp_path / "fresh", job(1))
    unickpt.load(tmp_path / "trained", job(0))  # what the message says to do
    partly = job(1)
    partly["optim"].add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    with pytest.raises(LoadMismatch) as caught:
        unickpt.load(tmp_path / "trained", partly)
    assert "has nothing under" not in str(caught.value)
    assert "1 parameter that was not in its groups when it was saved" in str(caught.value)


def test_a_container_as_a_pattern_is_answered_by_the_pattern(stored: Path) -> None:
    with pytest.raises(LoadMismatch, match=r"All below 'b' is 'b/\*\*'"):
        unickpt.load(stored, only="b")


def test_a_process_of_torchrun_without_a_group_says_so(
    processes: Processes, tmp_path: Path
) -> None:
    program = f"""
import warnings
import torch, unickpt
warnings.simplefilter("error")
alone = unickpt.SaveOptions(group=unickpt.ProcessGroup(0, 1, "a"))
unickpt.save(r"{tmp_path}/0", {{"w": torch.ones(3)}}, options=alone)
unickpt.load(r"{tmp_path}/0")  # as a job does before it begins
warnings.simplefilter("default")
for step in (1, 2):
    unickpt.save(r"{tmp_path}/" + str(step), {{"w": torch.ones(3)}})
"""
    launched = {"RANK": "0", "WORLD_SIZE": "2"}
    process = processes.forked(program, of=["torch"], env=launched)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert said.count("WORLD_SIZE is 2, but torch.distributed is not initialised") == 1


def test_an_endpoint_without_a_scheme_is_no_damage(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "127.0.0.1:9000")
    with pytest.raises(unickpt.errors.InvalidPath, match=r"must begin with http:// or https://"):
        unickpt.load("s3://bucket/step_1")
    for called, own in (("gcs", "gs"), ("s3a", "s3")):
        with pytest.raises(unickpt.errors.InvalidPath, match=f"did you mean {own}://"):
            unickpt.load(f"{called}://bucket/step_1")


def test_a_tree_in_place_of_a_step_is_not_printed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be an integer") as caught:
        Checkpointer(tmp_path).save({"w": np.ones((90, 90))}, 1)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 200


def test_a_run_of_another_system_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    for name in ("checkpoint-500", "checkpoint-1000", ".cache", "step_5"):
        (tmp_path / name).mkdir()
    with pytest.raises(CheckpointNotFound, match=r"it has checkpoint-1000, checkpoint-500, which"):
        Checkpointer(tmp_path).load()
    with pytest.raises(
        CheckpointNotFound, match=r"no step is committed in .*/none; check the path;"
    ):
        Checkpointer(tmp_path / "none").load()


def test_a_report_into_a_folder_that_is_not_there_names_the_folder(run: Path) -> None:
    with pytest.raises(
        unickpt.StorageError, match=r"cannot be written: there is no folder '.*/no'"
    ):
        unickpt.report(run, run / "no" / "report.html")


def test_a_run_without_the_number_of_its_steps_is_not_merged(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"as last= \(--last on the command line\)"):
        unickpt.merge([run], tmp_path / "merged")
