"""Checkpoints that older and newer versions of the frameworks wrote, as their users write them:
each is read bit for bit, and loads into the objects of the versions that are installed.

`tests/fixtures/versions/README.md` says how they were made.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import versions
from support.versions import Case

import unickpt
from unickpt import LoadMismatch, Rules
from unickpt.adapters.torch import NamedOptimizer

pytestmark = pytest.mark.integration

WROTE = {
    "torch-2.2": {"torch": "2.2.2"},
    "torch-2.6": {"torch": "2.6.0"},
    "torch-2.13": {"torch": "2.13.0"},
    "torch-2.14": {"torch": "2.14.1"},
    "jax-0.4": {
        "jax": "0.4.20", "flax": "0.7.5", "optax": "0.1.7", "orbax-checkpoint": "0.4.4",
    },
    "jax-0.6": {
        "jax": "0.6.2", "flax": "0.10.7", "optax": "0.2.4", "orbax-checkpoint": "0.11.19",
    },
    "jax-0.10": {
        "jax": "0.10.2", "flax": "0.12.8", "optax": "0.2.8", "orbax-checkpoint": "0.12.8",
    },
    "transformers-4.57": {"transformers": "4.57.6"},
    "transformers-5.23": {"transformers": "5.23.0"},
    "lightning-2.2": {"lightning": "2.2.5", "torch": "2.2.2"},
    "lightning-2.6": {"lightning": "2.6.6"},
}  # fmt: skip
"""The versions whose checkpoints must stay readable. Add new ones; none is ever removed."""


def of(framework: str) -> Any:
    return pytest.mark.parametrize("name", [n for n in WROTE if n.startswith(framework)])


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    return versions.unpack(tmp_path_factory.mktemp("versions"))


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Trainers and Orbax log what they do."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


def test_the_fixtures_are_of_these_versions(cases: dict[str, Case]) -> None:
    told = {name: case.about["versions"] for name, case in cases.items()}
    found = {
        name: {package: told[name][package].partition("+")[0] for package in wanted}
        for name, wanted in WROTE.items()
        if name in told
    }
    assert found == WROTE
    assert set(told) == set(WROTE)
    wanted = {"torch": 2, "jax": 7, "transformers": 4, "lightning": 1}
    for name, case in cases.items():
        assert len(case.checkpoints) >= wanted[case.about["framework"]], name


@pytest.mark.parametrize("name", WROTE)
def test_each_checkpoint_is_read_bit_for_bit(name: str, cases: dict[str, Case]) -> None:
    case = cases[name]
    for checkpoint in case.checkpoints:
        found = unickpt.open(case.path / checkpoint)
        assert list(versions.differences(case, checkpoint, found)) == [], checkpoint


@pytest.mark.parametrize("name", WROTE)
def test_each_checkpoint_becomes_one_of_ours(
    name: str, cases: dict[str, Case], tmp_path: Path
) -> None:
    case = cases[name]
    for number, checkpoint in enumerate(case.checkpoints[:2]):
        into = tmp_path / str(number)
        unickpt.convert(case.path / checkpoint, into)
        found = unickpt.open(into)
        assert list(versions.differences(case, checkpoint, found)) == [], checkpoint


# --- torch --------------------------------------------------------------------------------------


def unequal(found: Any, wanted: Any, at: str = "") -> Iterator[str]:
    """The leaves in which two states of torch differ; of tensors, every bit counts."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        for key in sorted({*found, *wanted}, key=str):
            if key in found and key in wanted:
                yield from unequal(found[key], wanted[key], f"{at}/{key}")
            else:
                yield f"{at}/{key} is {found.get(key, 'missing')}, not {wanted.get(key, 'missing')}"
    elif isinstance(wanted, list | tuple) and len(found) == len(wanted):
        for number, pair in enumerate(zip(found, wanted, strict=True)):
            yield from unequal(*pair, f"{at}/{number}")
    elif hasattr(wanted, "dtype"):
        wrote = versions.written_by("torch")
        one, other = wrote.as_numpy(found), wrote.as_numpy(wanted)
        if (one[1], one[0].tobytes()) != (other[1], other[0].tobytes()):
            yield f"{at} is {found}, not {wanted}"
    elif found != wanted or type(found) is not type(wanted):
        yield f"{at} is {found!r}, not {wanted!r}"


@of("torch")
def test_training_goes_on_from_a_file_as_torch_itself_goes_on(
    name: str, cases: dict[str, Case]
) -> None:
    torch = pytest.importorskip("torch")
    wrote = versions.written_by("torch")
    path = cases[name].path / "checkpoint.pt"
    results = []
    for by in ("torch", "unickpt"):
        model = wrote.net(seed=7)
        optimizer = wrote.optimizer_of(model)
        schedulers = wrote.schedulers_of(optimizer)
        parts = {"model": model, "optimizer": optimizer, "schedulers": schedulers}
        if by == "torch":
            stored = torch.load(path, weights_only=False)
            model.load_state_dict(stored["model"])
            optimizer.load_state_dict(stored["optimizer"])
            for key, each in schedulers.items():
                each.load_state_dict(stored["schedulers"][key])
            for group in optimizer.param_groups:  # torch's default for a state of before 2.7
                assert group["decoupled_weight_decay"] is True
        else:
            _, report = unickpt.load(path, parts, unexpected="skip", return_report=True)
            check_settings(name, report)
        wrote.train(model, optimizer, range(3, 6), schedulers)
        states = [optimizer.state_dict(), *(each.state_dict() for each in schedulers.values())]
        for state in states:  # torch takes `verbose` into a scheduler that no longer has it
            for scheduler in (state, *state.get("_schedulers", ())):
                scheduler.pop("verbose", None)
        results.append([model.state_dict(), *states])
    by_torch, ours = results
    assert list(unequal(ours, by_torch)) == []


def check_settings(name: str, report: Any) -> None:
    """Asserts that what only one version has is named, and that nothing else is."""
    ends = {"torch-2.2": 3, "torch-2.6": 2}.get(name, 0)
    kinds = ["decoupled_weight_decay", "_is_initial", "default_min_lr"][:ends]
    assert {kept.rpartition("/")[2] for kept in report.kept} == set(kinds)
    skipped = [x for x in report.skipped if x.startswith(("model/", "optimizer/", "schedulers/"))]
    assert {x.rpartition("/")[2] for x in skipped} == ({"verbose"} if ends else set())


@of("torch")
def test_random_generators_go_on_from_a_file(name: str, cases: dict[str, Case]) -> None:
    torch = pytest.importorskip("torch")
    found = unickpt.load(cases[name].path / "checkpoint.pt", under="rng/")
    generator = torch.Generator()
    generator.set_state(torch.from_numpy(np.asarray(found["torch"])))
    assert torch.rand(3, generator=generator).equal(
        torch.rand(3, generator=torch.Generator().manual_seed(3))
    )
    numbers = np.random.RandomState()
    numbers.set_state(tuple(found["numpy"]))
    assert numbers.rand() == np.random.RandomState(2).rand()


@of("torch")
@pytest.mark.parametrize("way", ["load", "integrations.dcp"])
def test_a_folder_of_two_ranks_loads_into_a_model(
    name: str, way: str, cases: dict[str, Case]
) -> None:
    torch_state = pytest.importorskip("torch.distributed.checkpoint.state_dict")
    wrote, case = versions.written_by("torch"), cases[name]
    model = wrote.net(seed=7)
    optimizer = wrote.optimizer_of(model)
    if way == "load":
        tree = {"model": model, "optim": NamedOptimizer(optimizer, model)}
        unickpt.load(case.path / "dcp", tree, unexpected="skip")
    else:
        from unickpt.integrations import dcp

        weights, moments = torch_state.get_state_dict(model, optimizer)
        state = {"model": weights, "optim": moments, "step": 0, "how": ""}
        dcp.load(state, checkpoint_id=str(case.path / "dcp"))
        torch_state.set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )
        assert state["step"] == 1
    wanted = case.arrays("dcp")
    weights, moments = torch_state.get_state_dict(model, optimizer)
    for key, weight in weights.items():
        assert np.array_equal(wrote.as_numpy(weight)[0], as_bits(wanted[f"model/{key}"])), key
    for key, slots in moments["state"].items():
        for slot, value in slots.items():
            assert np.array_equal(value.numpy(), wanted[f"optim/state/{key}/{slot}"]), (key, slot)


def as_bits(array: np.ndarray) -> np.ndarray:
    return array.view("u2") if array.dtype.name == "bfloat16" else array


# --- JAX, Flax, optax, Orbax --------------------------------------------------------------------


def written_by_jax() -> Any:
    pytest.importorskip("flax")
    pytest.importorskip("orbax.checkpoint")
    return versions.written_by("jax")


def abstract_state(optimizer: str) -> Any:
    """The shapes of a state of today's Flax and optax."""
    import jax

    wrote = written_by_jax()
    tx = wrote.optimizers()[optimizer]
    return jax.eval_shape(lambda: wrote.new_state(tx)).replace(step=0)


def check_state(found: Any, case: Case, checkpoint: str, under: str) -> None:
    """Asserts that a state of Flax holds the arrays of a part of a checkpoint, in their places."""
    import flax
    from make import leaves

    arrays, told = versions.written_by("jax").as_numpy, case.arrays(checkpoint)
    wanted = {k.removeprefix(under): v for k, v in told.items() if k.startswith(under)}
    count = 0
    for name, leaf in leaves(flax.serialization.to_state_dict(found)):
        array = arrays(leaf)
        if array is None:
            continue
        count += 1
        stored = wanted.pop(name)
        assert (array[0].shape, array[1]) == (stored.shape, stored.dtype.name), name
        assert array[0].tobytes() == stored.tobytes(), name
    assert count
    assert not wanted


# In these, optax has changed a dtype that it derives (from weights of bfloat16), or added a count.
CHANGED = {
    ("jax-0.4", "injected"): (7, r"hyperparams_states/learning_rate/count +missing"),
    ("jax-0.4", "accumulated"): (2, r"acc_grads/down/bias +dtype +bfloat16 +float32"),
    ("jax-0.6", "injected"): (6, r"hyperparams/b\{1..2\} +dtype +bfloat16 +float32"),
    ("jax-0.6", "accumulated"): (2, r"acc_grads/down/bias +dtype +bfloat16 +float32"),
    ("jax-0.10", "injected"): (2, r"mu/down/bias +dtype +float32 +bfloat16"),
}


@of("jax")
@pytest.mark.parametrize("checkpoint", ["pytree", "states.msgpack"])
def test_states_of_optax_load_into_those_of_today(
    name: str, checkpoint: str, cases: dict[str, Case]
) -> None:
    """Or the message names each leaf that this version of optax has of another dtype."""
    wrote, case = written_by_jax(), cases[name]
    for kind in wrote.optimizers():
        under = f"states/{kind}/" if checkpoint == "pytree" else f"{kind}/"
        like, path = abstract_state(kind), case.path / checkpoint
        count, row = CHANGED.get((name, kind), (0, ""))
        if not count:
            found = unickpt.load(path, like, under=under)
            check_state(found, case, checkpoint, under)
            continue
        with pytest.raises(LoadMismatch, match=f": {count} differences") as raised:
            unickpt.load(path, like, under=under)
        assert raised.match(row)
        assert raised.match("cast=True")
        if "missing" not in row:
            unickpt.load(path, like, under=under, cast=True)


def test_a_count_that_optax_has_added_is_made_by_a_rule(cases: dict[str, Case]) -> None:
    like = abstract_state("injected")
    count = "opt_state/count = opt_state/hyperparams_states/learning_rate/count"
    rules = Rules.parse(f"opt_state/count <-> {count}\ndefault {{m...}} <-> {{m...}}")
    path = cases["jax-0.4"].path / "pytree"
    options = {"rules": rules, "cast": True, "unexpected": "skip"}
    found, report = unickpt.load(
        path, like, under="states/injected/", return_report=True, **options
    )
    assert not report.kept
    assert int(found.opt_state.hyperparams_states["learning_rate"].count) == 2


@of("jax")
def test_each_layout_loads_into_a_train_state(name: str, cases: dict[str, Case]) -> None:
    like, case = abstract_state("clipped"), cases[name]
    for checkpoint in ("ocdbt", "files", "flax/checkpoint_2", "flax_by_orbax/checkpoint_2"):
        check_state(unickpt.load(case.path / checkpoint, like), case, checkpoint, "")


@of("jax")
def test_a_run_of_an_older_orbax_continues_with_our_handler(
    name: str, cases: dict[str, Case], tmp_path: Path
) -> None:
    case = cases[name]
    import orbax.checkpoint as ocp

    from unickpt.integrations.orbax import registry

    shutil.copytree(case.path / "run", tmp_path / "run")
    like = abstract_state("clipped")
    with ocp.CheckpointManager(tmp_path / "run", handler_registry=registry()) as manager:
        assert list(manager.all_steps()) == [3, 5]
        assert manager.metrics(3) == {"loss": 1 / 3}
        state, extra = ocp.args.StandardRestore(like), ocp.args.JsonRestore()
        found = manager.restore(5, args=ocp.args.Composite(state=state, extra=extra))
        check_state(found["state"], case, "run/5", "state/")
        assert found["extra"] == {"loss": 0.2, "step": 5}
        untyped = manager.restore(3, args=ocp.args.Composite(extra=extra))
        assert untyped["extra"] == {"loss": 1 / 3, "step": 3}
        saved = ocp.args.StandardSave(found["state"])
        manager.save(6, args=ocp.args.Composite(state=saved), metrics={"loss": 0.1})
        manager.wait_until_finished()
        assert list(manager.all_steps()) == [3, 5, 6]
    assert (tmp_path / "run" / "6" / "state" / "UNICKPT.txt").exists()


def test_a_run_of_todays_nnx_continues_with_our_handler(cases: dict[str, Case]) -> None:
    like, case = abstract_variables(), cases["jax-0.10"]
    import orbax.checkpoint as ocp

    from unickpt.integrations.orbax import registry

    with ocp.CheckpointManager(case.path / "nnx", handler_registry=registry()) as manager:
        found = manager.restore(5, args=ocp.args.StandardRestore(like))
    check_variables(found, case)


def abstract_variables() -> Any:
    """The shapes of a module of today's NNX and of its optimizer."""
    written_by_jax()
    from flax import nnx

    wrote = versions.written_by("nnx")
    return wrote.state_of(*nnx.eval_shape(wrote.new))


def check_variables(found: Any, case: Case, renamed: tuple[str, str] = ("", "")) -> None:
    """Asserts that the variables of a state of NNX hold what was stored."""
    import jax
    from flax import nnx

    told, count = case.arrays("nnx/5"), 0
    for path, leaf in nnx.to_flat_state(nnx.State(found)):
        name = "/".join(map(str, path)).replace(*renamed) + "/value"
        value = leaf[...] if hasattr(leaf, "get_value") else leaf
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        assert np.asarray(value).tobytes() == told[name].tobytes(), name
        count += 1
    assert count == 24


def test_a_run_of_an_older_nnx_says_which_variables_it_calls_otherwise(
    cases: dict[str, Case],
) -> None:
    """Flax 0.11 has renamed the generator of Dropout, and an Optimizer no longer has its model."""
    like, case = abstract_variables(), cases["jax-0.6"]
    path = case.path / "nnx" / "5"
    with pytest.raises(LoadMismatch, match=r"model/drop/rngs/key +missing") as raised:
        unickpt.load(path, like)
    assert raised.match(r"optimizer/model/down/bias/value +unexpected")
    renamed = "model/drop/rngs/default/{x}/value <-> model/drop/rngs/{x}\n"
    rules = Rules.parse(renamed + "default {m...}/value <-> {m...}")
    found, report = unickpt.load(path, like, rules=rules, unexpected="skip", return_report=True)
    assert not report.kept
    assert all(name.startswith("optimizer/model/") for name in report.skipped)
    check_variables(found, case, ("/rngs/", "/rngs/default/"))


# --- trainers -----------------------------------------------------------------------------------


@of("transformers")
def test_a_trainer_with_the_mixin_goes_on_from_a_folder_of_the_trainer(
    name: str, cases: dict[str, Case], tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from unickpt.integrations.transformers import UnickptMixin

    class MyTrainer(UnickptMixin, transformers.Trainer):  # type: ignore[misc, unused-ignore]
        pass

    case, wrote = cases[name], versions.written_by("transformers")
    shutil.copytree(case.path / "run", tmp_path / "run")
    torch.set_num_threads(1)
    trainer = wrote.trainer_of(tmp_path / "run", MyTrainer, save_steps=3, save_total_limit=None)
    trainer.train(resume_from_checkpoint=True)
    assert [log["step"] for log in trainer.state.log_history if "loss" in log] == [1, 2, 3, 4, 5, 6]
    assert (tmp_path / "run" / "step_6").is_dir()
    check_end(case, trainer.model.state_dict())


@of("lightning")
@pytest.mark.filterwarnings("ignore")  # Lightning's own, of few workers and of a moved run
def test_a_trainer_of_lightning_with_the_plugin_goes_on_from_a_file_of_lightning(
    name: str, cases: dict[str, Case], tmp_path: Path
) -> None:
    pytest.importorskip("lightning")
    from unickpt.integrations.lightning import UnickptCheckpointIO

    case, wrote = cases[name], versions.written_by("lightning")
    path = case.path / "run" / "step=4.ckpt"
    plugins = [UnickptCheckpointIO()]
    trainer = wrote.fit(tmp_path / "run", 8, ckpt_path=path, plugins=plugins)
    assert trainer.global_step == 8
    assert (tmp_path / "run" / "step=8.ckpt").is_dir()
    check_end(case, trainer.lightning_module.state_dict())


def check_end(case: Case, weights: dict[str, Any]) -> None:
    """Asserts that a run that went on ends as the one that nobody interrupted. Its sums were made
    by another version, on another machine."""
    wanted = case.arrays("end")
    assert set(weights) == set(wanted)
    for key, weight in weights.items():
        np.testing.assert_allclose(weight.numpy(), wanted[key], rtol=1e-4, atol=1e-6)
