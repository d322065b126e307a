"""A flag of `param_groups` that another version of torch has, or lacks, stops no load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import unickpt
from unickpt import LoadMismatch

torch = pytest.importorskip("torch")


def trained(kind: Any = torch.optim.AdamW, **settings: Any) -> dict[str, Any]:
    model = torch.nn.Linear(2, 3)
    optimizer = kind(model.parameters(), **settings)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return {"model": model, "optim": optimizer}


def stored(tree: dict[str, Any], path: Path) -> Path:
    if path.suffix == ".pt":
        torch.save({name: part.state_dict() for name, part in tree.items()}, path)
    else:
        unickpt.save(path, tree)
    return path


FORMATS = pytest.mark.parametrize("name", ["step", "step.pt"])


@FORMATS
def test_a_flag_that_the_older_version_lacks_keeps_its_value(name: str, tmp_path: Path) -> None:
    older = trained(lr=0.5)
    older["optim"].param_groups[0].pop("decoupled_weight_decay", None)
    newer = trained()
    newer["optim"].param_groups[0]["decoupled_weight_decay"] = True
    _, report = unickpt.load(stored(older, tmp_path / name), newer, return_report=True)
    assert report.kept == ("optim/param_groups/0/decoupled_weight_decay",)
    assert report.kept[0] in str(report)
    group = newer["optim"].param_groups[0]
    assert group["decoupled_weight_decay"] is True
    assert group["lr"] == 0.5
    for ours, theirs in zip(newer["model"].parameters(), older["model"].parameters(), strict=True):
        assert torch.equal(ours, theirs)
        state = newer["optim"].state[ours], older["optim"].state[theirs]
        assert torch.equal(state[0]["exp_avg"], state[1]["exp_avg"])


@FORMATS
def test_a_flag_that_only_the_newer_version_has_is_skipped(name: str, tmp_path: Path) -> None:
    newer = trained()
    newer["optim"].param_groups[0]["is_new"] = True
    newer["optim"].param_groups[0]["initial_lr"] = 0.25
    older = trained(lr=0.5)
    _, report = unickpt.load(stored(newer, tmp_path / name), older, return_report=True)
    skipped = {"optim/param_groups/0/initial_lr", "optim/param_groups/0/is_new"}
    assert skipped <= set(report.skipped)
    assert "is_new" in str(report)
    assert older["optim"].param_groups[0]["lr"] == 1e-3


@FORMATS
@pytest.mark.parametrize("key", ["weight_decay", "betas"])
def test_what_decides_how_to_train_is_never_missing(key: str, name: str, tmp_path: Path) -> None:
    tree = trained()
    del tree["optim"].param_groups[0][key]
    with pytest.raises(LoadMismatch, match=rf"{key}.*missing"):
        unickpt.load(stored(tree, tmp_path / name), trained())


def test_another_number_of_groups_is_still_refused(tmp_path: Path) -> None:
    two = trained()
    two["optim"].add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    stored(two, tmp_path / "two")
    with pytest.raises((LoadMismatch, unickpt.UnsupportedLeaf), match="param"):
        unickpt.load(tmp_path / "two", trained())


def test_another_optimizer_is_still_refused(tmp_path: Path) -> None:
    stored(trained(torch.optim.SGD, lr=0.5), tmp_path / "sgd")
    with pytest.raises((LoadMismatch, unickpt.UnsupportedLeaf), match=r"betas|exp_avg"):
        unickpt.load(tmp_path / "sgd", trained())


def scheduled() -> Any:
    optimizer = trained()["optim"]
    schedulers = torch.optim.lr_scheduler
    sequence = schedulers.ExponentialLR(optimizer, 0.5), schedulers.CosineAnnealingLR(optimizer, 8)
    found = {
        "sequence": schedulers.SequentialLR(optimizer, sequence, [2]),
        "plateau": schedulers.ReduceLROnPlateau(optimizer),
    }
    optimizer.step()
    return found


@FORMATS
def test_flags_of_schedulers_come_and_go(name: str, tmp_path: Path) -> None:
    older = scheduled()
    older["sequence"].step()
    older["plateau"].step(0.5)
    for each in (older["plateau"], older["sequence"]._schedulers[0]):
        each.verbose = False
    del older["plateau"].default_min_lr
    vars(older["sequence"]._schedulers[0]).pop("_is_initial", None)
    newer = scheduled()
    newer["sequence"]._schedulers[0]._is_initial = False
    for each in (newer["plateau"], newer["sequence"]._schedulers[0]):
        vars(each).pop("verbose", None)
    path = stored(older, tmp_path / name)
    _, report = unickpt.load(path, newer, return_report=True)
    assert report.kept == ("plateau/default_min_lr", "sequence/_schedulers/0/_is_initial")
    assert report.skipped == ("plateau/verbose",)  # dicts within grow, as by load_state_dict
    assert newer["sequence"].last_epoch == 1
    assert newer["plateau"].best == 0.5
    assert newer["plateau"].default_min_lr == 0


def test_flags_of_what_is_no_scheduler_are_missing(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "step", {"run": {"last_epoch": 3}})
    with pytest.raises(LoadMismatch, match=r"run/is_frozen *missing"):
        unickpt.load(tmp_path / "step", {"run": {"last_epoch": 0, "is_frozen": False}})


def test_a_setting_of_a_scheduler_that_decides_is_missing(tmp_path: Path) -> None:
    older = scheduled()
    del older["plateau"].patience
    with pytest.raises(LoadMismatch, match=r"plateau/patience *missing"):
        unickpt.load(stored(older, tmp_path / "step"), scheduled())


def test_what_a_rename_would_mend_may_be_skipped(tmp_path: Path) -> None:
    """The message is made of what is skipped, too."""
    unickpt.save(tmp_path / "step", {"a": {"old": 1}, "b": {"old": 2}, "c": 3})
    like = {"a": {"new": 0}, "b": {"new": 0}, "d": 0}
    with pytest.raises(LoadMismatch, match=r"requested 'new', stored 'old'"):
        unickpt.load(tmp_path / "step", like, unexpected="skip")


RULES = "o/{n...} <-> optim/{n...}\nm/{n...} <-> model/{n...}"


@FORMATS
@pytest.mark.parametrize("lacking", ["stored", "requested"])
def test_through_rules(lacking: str, name: str, tmp_path: Path) -> None:
    older, newer = trained(lr=0.5), trained()
    older["optim"].param_groups[0].pop("decoupled_weight_decay", None)
    newer["optim"].param_groups[0]["decoupled_weight_decay"] = True
    kept, like = (older, newer) if lacking == "stored" else (newer, older)
    path = stored({"o": kept["optim"], "m": kept["model"]}, tmp_path / name)
    unickpt.load(path, like, rules=unickpt.Rules.parse(RULES))
    assert like["optim"].param_groups[0]["lr"] == kept["optim"].param_groups[0]["lr"]
    for ours, theirs in zip(like["model"].parameters(), kept["model"].parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("key", ["weight_decay", "betas"])
@pytest.mark.parametrize("lacking", ["stored", "requested"])
def test_what_decides_how_to_train_is_never_missing_through_rules(
    lacking: str, key: str, tmp_path: Path
) -> None:
    kept, like = trained(), trained()
    del {"stored": kept, "requested": like}[lacking]["optim"].param_groups[0][key]
    unickpt.save(tmp_path / "c", {"o": kept["optim"], "m": kept["model"]})
    with pytest.raises((LoadMismatch, unickpt.errors.RuleError), match=key):
        unickpt.load(tmp_path / "c", like, rules=unickpt.Rules.parse(RULES))
