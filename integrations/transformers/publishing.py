"""PublishWeights: a Trainer publishes versions of its weights."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from unickpt.plugins.weights import Publisher


class PublishWeights(TrainerCallback):
    """Publishes the weights that a Trainer starts with, and those after its optimizer steps.

    A version has the number of the step. If training starts again at an earlier step, its versions
    continue above the last one, because a version never changes; the metadata `step` tells the
    step.

    Arguments:
        publisher: of this job, on every process. It is not closed.
        every: steps from one version to the next; the last step is published in any case.

    Raises:
        ValueError: `every` is less than 1; or, when training starts, DeepSpeed's ZeRO 3 has
            partitioned the parameters.

    Example:
        >>> from unickpt.plugins.weights import Publisher
        >>> callback = PublishWeights(Publisher("memory://docs/publish"), every=10)
    """

    def __init__(self, publisher: Publisher, *, every: int = 1) -> None:
        if every < 1:
            raise ValueError(f"every={every!r} must be an integer, at least 1")
        self.publisher, self.every = publisher, every
        self._above, self._published = 0, -1

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if any(hasattr(parameter, "ds_tensor") for parameter in kwargs["model"].parameters()):
            raise ValueError(
                "DeepSpeed's ZeRO 3 has partitioned the parameters, so PublishWeights cannot "
                "publish them; use ZeRO 2, or FSDP2"
            )
        self.publisher.wait()
        newest = max(self.publisher.versions(), default=-1)
        self._above = max(0, newest + 1 - state.global_step)
        self._publish(state, **kwargs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.every == 0:
            self._publish(state, **kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step != self._published:
            self._publish(state, **kwargs)
        self.publisher.wait()

    def _publish(self, state: Any, *, model: Any, **kwargs: Any) -> None:
        step = state.global_step
        self.publisher.publish(step + self._above, model, metadata={"step": step})
        self._published = step
