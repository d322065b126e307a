"""What a process with Keras does in tests: `python -m support.keras_cases CASE FOLDER`; the backend
is KERAS_BACKEND, and JAX has 8 devices."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import unickpt
from unickpt.integrations import keras as ours

BATCHES, SIZE = 10, 8
X = np.random.default_rng(0).normal(size=(BATCHES * SIZE, 16)).astype("float32")
Y = X.sum(1, keepdims=True)


def make(
    seed: int = 0,
    *,
    compiled: bool = True,
    dtype: str = "float32",
    units: int = 32,
    **settings: Any,
) -> Any:
    """A model with weights of three kinds; its names are the same each time."""
    distribution = keras.distribution.distribution()
    keras.utils.clear_session()  # clears this, too
    keras.distribution.set_distribution(distribution)
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [
            keras.Input((16,)),
            keras.layers.Dense(units, activation="relu", dtype=dtype),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(1),
        ],
        name="model",
    )
    if compiled:
        model.compile(keras.optimizers.AdamW(0.01), "mse", metrics=["mae"], **settings)
    return model


def fit(model: Any, *callbacks: Any, epochs: int = 1, **arguments: Any) -> Any:
    given = {"batch_size": SIZE, "verbose": 0, "epochs": epochs} | arguments
    return model.fit(X, Y, callbacks=list(callbacks), **given)


def bits(model: Any) -> dict[str, Any]:
    """Everything that a model holds, by path."""
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    # Keras has the bits of torch's seeds as int32.
    return {
        v.path: (value.view(np.uint32) if "seed" in v.path else value).tobytes()
        for v, value in ((v, np.array(keras.ops.convert_to_numpy(v.value))) for v in variables)
    }


def steps(folder: Path) -> list[int]:
    with unickpt.Checkpointer(folder) as checkpointer:
        return checkpointer.steps()


class Stop(keras.callbacks.Callback):
    """Ends a fit with an error, after a batch."""

    def __init__(self, epoch: int, batch: int) -> None:
        super().__init__()
        self.at = epoch, batch

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if (self.epoch, batch) == self.at:
            raise Stopped


class Stopped(Exception):
    pass


def stopped(
    model: Any, callback: Any, epoch: int, batch: int, *others: Any, **arguments: Any
) -> None:
    """A fit that raises an error after a batch; its saves are done."""
    with pytest.raises(Stopped):
        fit(model, callback, *others, Stop(epoch, batch), **arguments)
    callback.close()


class Losses(keras.callbacks.Callback):
    """The loss after each iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, float] = {}

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen[int(self.model.optimizer.iterations)] = float((logs or {})["loss"])


# --- one backend ----------------------------------------------------------------------------------


def saves_and_loads(folder: Path) -> None:
    model = make()
    fit(model)
    wanted = bits(model)
    ours.save(folder / "c", model)
    with pytest.raises(unickpt.CheckpointExists):
        ours.save(folder / "c", model)
    other = make(1)
    assert bits(other)["model/dense/kernel"] != wanted["model/dense/kernel"]
    report = ours.load(folder / "c", other)
    found = bits(other)  # its metrics are made with the first batch
    assert found == {path: wanted[path] for path in found}
    assert "loss/total" in found
    assert "optimizer/adamw/iteration" in str(report) or report
    fit(other)
    ours.load(unickpt.open(folder / "c"), other)
    assert bits(other) == wanted
    stored = unickpt.load(folder / "c")
    assert stored["model"]["seed_generator"]["seed_generator_state"].dtype == np.uint32
    unickpt.verify(folder / "c")


def loads_weights_only(folder: Path) -> None:
    model = make()
    fit(model)
    ours.save(folder / "w", model, weights_only=True)
    assert set(unickpt.load(folder / "w")) == {"model"}
    bare = make(1, compiled=False)
    with pytest.raises(ValueError, match="weights_only=True"):
        ours.load(folder / "w", bare)
    ours.load(folder / "w", bare, weights_only=True)
    assert np.array_equal(bare.predict(X, verbose=0), model.predict(X, verbose=0))
    with pytest.raises(unickpt.LoadMismatch, match="optimizer"):
        ours.load(folder / "w", model)
    ours.save(folder / "all", model)
    bare.layers[0].trainable = False  # is no reason not to load
    ours.load(folder / "all", bare, weights_only=True)


def builds_models_from_checkpoints_alone(folder: Path) -> None:
    model = make()
    fit(model, ours.UnickptCheckpoint(folder / "run", max_to_keep=None), epochs=2)
    wanted = bits(model)
    for path in (folder / "run", folder / "run" / "step_1", unickpt.open(folder / "run/step_1")):
        keras.utils.clear_session()
        found = ours.load_model(path)
        assert {name: wanted[name] for name in bits(found)} == bits(found)
    # When a first fit is set up, it draws random numbers.
    seeded = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: keras.utils.set_random_seed(2)
    )
    for one in (found, model):
        fit(one, seeded, shuffle=False)
    assert found.optimizer.iterations == model.optimizer.iterations
    assert np.array_equal(found.predict(X, verbose=0), model.predict(X, verbose=0))
    ours.save(folder / "bare", make(compiled=False))
    assert getattr(ours.load_model(folder / "bare"), "optimizer", None) is None
    ours.save(folder / "weights", model, weights_only=True)
    with pytest.raises(unickpt.LoadMismatch, match="no configuration of its model"):
        ours.load_model(folder / "weights")
    with pytest.raises(unickpt.CheckpointNotFound):
        ours.load_model(folder / "nothing")


class Doubled(keras.layers.Layer):
    """A layer of somebody's own."""

    def call(self, x: Any) -> Any:
        return 2 * x


def needs_to_know_own_layers_and_runs_no_code(folder: Path) -> None:
    keras.utils.clear_session()
    own = keras.Sequential([keras.Input((16,)), Doubled(), keras.layers.Dense(1)])
    ours.save(folder / "own", own)
    found = ours.load_model(folder / "own", {"Doubled": Doubled})
    assert np.array_equal(found.predict(X, verbose=0), own.predict(X, verbose=0))
    code = keras.Sequential([keras.Input((16,)), keras.layers.Lambda(lambda x: 2 * x)])
    ours.save(folder / "code", code)
    with pytest.raises(ValueError, match="safe_mode"):
        ours.load_model(folder / "code")


def refuses_what_does_not_fit(folder: Path) -> None:
    model = make()
    fit(model)
    before = bits(model)
    ours.save(folder / "c", make(1, units=31))
    with pytest.raises(unickpt.LoadMismatch, match=r"dense/kernel.*31"):
        ours.load(folder / "c", model)
    renamed = keras.Sequential([keras.Input((16,)), keras.layers.Dense(32)], name="another")
    renamed.compile("adam", "mse")
    ours.save(folder / "r", renamed)
    with pytest.raises(unickpt.LoadMismatch, match="another/") as told:
        ours.load(folder / "r", model)
    assert "clear_session" in str(told.value.__notes__)
    assert bits(model) == before
    with pytest.raises(ValueError, match="not built"):
        ours.save(folder / "u", keras.Sequential([keras.layers.Dense(2)]))
    twice = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, name="a")], name="m")
    twice.add(keras.Sequential([keras.layers.Dense(2, name="a")], name="b"))
    twice.layers[0].kernel._path = twice.layers[1].layers[0].kernel.path
    with pytest.raises(unickpt.UnsupportedLeaf, match="two variables"):
        ours.save(folder / "t", twice)


def finishes_normalization(folder: Path) -> None:
    def normalized() -> Any:
        keras.utils.clear_session()
        return keras.Sequential([keras.Input((16,)), keras.layers.Normalization()], name="m")

    model, other = normalized(), normalized()
    model.layers[0].adapt(X * 3 + 1)
    ours.save(folder / "n", model, weights_only=True)
    ours.load(folder / "n", other, weights_only=True)
    assert np.array_equal(other.predict(X, verbose=0), model.predict(X, verbose=0))
    assert other.predict(X, verbose=0).std() < 0.5


# --- the callback ---------------------------------------------------------------------------------


def callback_of(folder: Path, save_freq: Any) -> Any:
    return ours.UnickptCheckpoint(folder, save_freq=save_freq, resume=True)


def resumes_within_an_epoch(folder: Path) -> None:
    whole, reference = make(), Losses()
    fit(whole, reference, epochs=4)
    for number, (save_freq, stop) in enumerate([(3, (1, 4)), ("epoch", (2, 5)), (5, (1, 9))]):
        run = folder / f"run_{number}"
        stopped(make(), callback_of(run, save_freq), *stop, epochs=4)
        model, losses = make(5), Losses()
        stopped(model, callback_of(run, save_freq), 2, 8, losses, epochs=4)
        callback, model = callback_of(run, save_freq), make(6)
        fit(model, callback, losses, epochs=4)
        for iteration, loss in losses.seen.items():
            assert loss == reference.seen[iteration], (save_freq, iteration)
        assert bits(model) == bits(whole), save_freq
        # All is done: nothing more happens, also if the same objects are used again.
        last = steps(run)
        fit(model, callback, losses, epochs=4, verbose=0)
        assert bits(model) == bits(whole)
        assert steps(run) == last


def resumes_with_several_batches_in_an_execution(folder: Path) -> None:
    def model(seed: int) -> Any:
        return make(seed, steps_per_execution=2)

    if keras.backend.backend() == "torch":
        return  # Keras refuses it

    whole = model(0)
    fit(whole, epochs=2)
    stopped(model(0), callback_of(folder / "e", 4), 1, 7, epochs=2)
    other = model(1)
    fit(other, callback_of(folder / "e", 4), epochs=2)
    assert bits(other) == bits(whole)
    # After the last execution of an epoch, which has 2 of 4 batches.
    whole = make(0, steps_per_execution=4)
    fit(whole, epochs=2)
    stopped(make(0, steps_per_execution=4), callback_of(folder / "p", 12), 1, 3, epochs=2)
    other = make(1, steps_per_execution=4)
    fit(other, callback_of(folder / "p", 12), epochs=2)
    assert bits(other) == bits(whole)
    stopped(make(), callback_of(folder / "o", 3), 0, 4)
    with pytest.raises(ValueError, match="steps_per_execution=2"):
        fit(model(0), callback_of(folder / "o", 3))


def resumes_with_data_that_begins_anew_in_each_epoch(folder: Path) -> None:
    import grain
    import torch

    class Rows(keras.utils.PyDataset):
        def __len__(self) -> int:
            return BATCHES

        def __getitem__(self, number: int) -> Any:
            rows = slice(number * SIZE, (number + 1) * SIZE)
            return X[rows], Y[rows]

    pairs = list(zip(X, Y, strict=True))
    tensors = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    for name, data in {
        "dataset": Rows,
        "threads": lambda: Rows(workers=2),  # which draw the order of an epoch before it begins
        "loader": lambda: torch.utils.data.DataLoader(tensors, SIZE, shuffle=True),
        "grain": lambda: grain.MapDataset.source(pairs).seed(3).shuffle().batch(SIZE),
    }.items():
        settings = {"epochs": 2, "verbose": 0, "shuffle": name != "threads"}
        whole = make()
        torch.manual_seed(0)  # which Keras does only with its torch backend
        whole.fit(data(), **settings)
        callback = callback_of(folder / name, 3)
        torch.manual_seed(0)
        with pytest.raises(Stopped):
            make().fit(data(), callbacks=[callback, Stop(1, 6)], **settings)
        callback.close()
        other = make(1)
        other.fit(data(), callbacks=[callback_of(folder / name, 3)], **settings)
        assert bits(other) == bits(whole), name


def refuses_to_go_on_with_other_batches(folder: Path) -> None:
    stopped(make(), callback_of(folder / "b", 3), 0, 4)
    resuming = callback_of(folder / "b", 3)
    with pytest.raises(ValueError, match="batch 3 of 10 of an epoch, which has 20"):
        fit(make(), resuming, batch_size=SIZE // 2)
    with pytest.raises(ValueError, match="initial_epoch"):
        fit(make(), resuming, epochs=4, initial_epoch=2)
    model = make()  # and another fit is not affected
    fit(model, epochs=1)
    assert int(model.optimizer.iterations) == BATCHES


def skipping_ends_with_its_fit(folder: Path) -> None:
    """A fit that fails while batches are skipped leaves nothing behind."""
    stopped(make(), callback_of(folder / "s", 8), 0, 8)
    model = make(1)
    stopped(model, callback_of(folder / "s", 8), 0, 3)
    assert int(model.optimizer.iterations) == 8
    fit(model)
    assert int(model.optimizer.iterations) == 8 + BATCHES
    # Nor does one that has gone on with a later epoch.
    stopped(make(), callback_of(folder / "l", 3), 1, 8, epochs=2)
    fit(model, callback_of(folder / "l", 3), epochs=2)
    fit(model)
    assert int(model.optimizer.iterations) == 3 * BATCHES


def keeps_what_is_asked(folder: Path) -> None:
    fit(make(), ours.UnickptCheckpoint(folder / "1"), epochs=3)
    assert steps(folder / "1") == [2]
    fit(make(), ours.UnickptCheckpoint(folder / "n", max_to_keep=None, save_freq=4), epochs=2)
    assert steps(folder / "n") == [4, 8, 12, 16, 20]
    weights = ours.UnickptCheckpoint(
        folder / "w", max_to_keep=2, save_weights_only=True, save_on_background=False
    )
    fit(make(), weights, epochs=3)
    assert steps(folder / "w") == [1, 2]
    assert set(unickpt.load(folder / "w" / "step_2")) == {"model", "fit"}
    # A directory of another run is not written into, nor read.
    with pytest.raises(unickpt.UnickptError, match="step"):
        fit(make(), ours.UnickptCheckpoint(folder / "w"))
    with pytest.raises(unickpt.LoadMismatch, match="optimizer"):
        fit(make(), ours.UnickptCheckpoint(folder / "w", resume=True))


def saves_the_best(folder: Path) -> None:
    class Values(keras.callbacks.Callback):
        """Says what the metric is; stands before the callback."""

        def __init__(self, name: str, *values: float) -> None:
            super().__init__()
            self.name, self.values = name, dict(enumerate(values))

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            logs[self.name] = self.values[epoch]

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if self.name == "loss":
                logs[self.name] = self.values[batch]

    def best(name: str, values: Values, epochs: int, **arguments: Any) -> list[int]:
        given = {"save_best_only": True, "max_to_keep": None, "monitor": "score"} | arguments
        fit(make(), values, ours.UnickptCheckpoint(folder / name, **given), epochs=epochs)
        return steps(folder / name)

    nan = float("nan")
    values = Values("score", 3, 5, nan, 4, 6, 2)
    assert best("max", values, 6, mode="max") == [0, 1, 4]
    assert best("min", values, 6, mode="min") == [0, 5]
    assert best("none", values, 2, mode="max", initial_value_threshold=9) == []
    assert (folder / "none").is_dir()
    assert best("least", values, 6, mode="max", initial_value_threshold=4.5) == [1, 4]
    with pytest.raises(ValueError, match="mode"):
        best("auto", values, 2)
    # The best value of the run that is resumed counts; it goes on after its step.
    assert best("again", Values("score", 3, 5, 4), 3, mode="max") == [0, 1]
    values = Values("score", 0, 0, 4.5, 6)
    assert best("again", values, 4, mode="max", resume=True) == [0, 1, 3]
    values = Values("loss", *[3, 4, 2, 5, 5, 5, 5, 1, 9, 9])
    assert best("batch", values, 1, save_freq=1, monitor="loss") == [1, 3, 8]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fit(make(), ours.UnickptCheckpoint(folder / "none", save_best_only=True))
    assert any("'val_loss' is not known at epoch 0" in str(w.message) for w in told)
    assert steps(folder / "none") == []


def checks_its_arguments(folder: Path) -> None:
    for arguments in (
        {"save_freq": "batch"},
        {"save_freq": 0},
        {"max_to_keep": 0},
        {"resume": True, "save_weights_only": True},
    ):
        with pytest.raises(ValueError, match=next(iter(arguments))):
            ours.UnickptCheckpoint(folder, **arguments)
    theirs = Parameters(keras.callbacks.OrbaxCheckpoint)
    mine = Parameters(ours.UnickptCheckpoint)
    assert {name: mine[name] for name in theirs} == theirs
    assert list(mine)[: len(theirs)] == list(theirs)


def Parameters(kind: type) -> dict[str, Any]:
    import inspect

    found = list(inspect.signature(kind).parameters.values())
    return {one.name: one.default for one in found}


def tells_of_errors(folder: Path) -> None:
    class Full(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:  # something is in the way
                (folder / "full").rename(folder / "moved")
                (folder / "full").write_text("")

    callback = ours.UnickptCheckpoint(folder / "full")
    with pytest.raises((unickpt.UnickptError, OSError)):
        fit(make(), callback, Full(), epochs=3)
    with suppress(unickpt.UnickptError, OSError):
        callback.close()


# --- from one to the other ------------------------------------------------------------------------


def writes(folder: Path) -> None:
    """A run that was stopped within an epoch, and a checkpoint by `save`."""
    model = make()
    callback = ours.UnickptCheckpoint(folder / "run", save_freq=3)
    stopped(model, callback, 1, 5, epochs=2)
    ours.save(folder / "saved", model)
    low = make(dtype="bfloat16")
    fit(low)
    ours.save(folder / "low", low)


def goes_on(folder: Path) -> None:
    """Loads what the other backend wrote, writes it again, and goes on with its run."""
    model = make(1)
    fit(model)
    for name, kind in (("saved", "float32"), ("low", "bfloat16")):
        model = make(1, dtype=kind)
        fit(model)
        ours.load(folder / name, model)
        ours.save(folder / f"{name}_again", model)
        assert unickpt.diff(folder / name, folder / f"{name}_again").same
    model, losses = make(1), Losses()
    fit(model, ours.UnickptCheckpoint(folder / "run", save_freq=3, resume=True), losses, epochs=2)
    assert int(model.optimizer.iterations) == 2 * BATCHES
    assert sorted(losses.seen) == list(range(15, 21))


CASES: dict[str, list[Callable[[Path], None]]] = {
    "functions": [
        saves_and_loads,
        loads_weights_only,
        builds_models_from_checkpoints_alone,
        needs_to_know_own_layers_and_runs_no_code,
        refuses_what_does_not_fit,
        finishes_normalization,
        checks_its_arguments,
    ],
    "callback": [
        refuses_to_go_on_with_other_batches,
        skipping_ends_with_its_fit,
        keeps_what_is_asked,
        saves_the_best,
        tells_of_errors,
    ],
    "resuming": [resumes_within_an_epoch],
    "data": [
        resumes_with_data_that_begins_anew_in_each_epoch,
        resumes_with_several_batches_in_an_execution,
    ],
    "writes": [writes],
    "goes_on": [goes_on],
    "sharded": [],  # in keras_sharded.py
}


if __name__ == "__main__":
    if sys.argv[1] == "sharded":
        from support import keras_sharded

        CASES["sharded"] = keras_sharded.CASES
    for case in CASES[sys.argv[1]]:
        place = Path(sys.argv[2])
        if len(CASES[sys.argv[1]]) > 1:
            place = place / case.__name__
            place.mkdir()
        try:
            case(place)
        except BaseException as error:
            error.add_note(f"in {case.__name__} with {keras.backend.backend()}")
            raise
    print(f"{len(CASES[sys.argv[1]])} cases")
