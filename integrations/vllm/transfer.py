"""The backend of weight transfer: every rank of an engine follows the versions of a Publisher."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from unickpt.integrations.serving.joint_flip import live_tree, make_live
from unickpt.integrations.serving.loading import rules_named
from unickpt.integrations.vllm import NAME
from unickpt.plugins.weights import Follower, Publisher

_log = logging.getLogger("unickpt")
_START = f"start vLLM with load_format={NAME!r} and weight_transfer_config={{'backend': {NAME!r}}}"


@dataclass
class FollowerInitInfo(WeightTransferInitInfo):
    """Where an engine finds the versions; see `Follower`.

    Arguments:
        root: of the publisher.
        rules: from published names to Hugging Face's: a preset's name, a file, or text; by default
            the publisher's.
        keep_copies, lease_s: as for `Follower`.
        swap: as for `Follower`; False needs less memory during an update, and pauses the engine
            longer.
    """

    root: str
    rules: str | None = None
    keep_copies: bool = False
    lease_s: float = 60.0
    swap: bool | Literal["pages"] = "pages"


@dataclass
class FollowerUpdateInfo(WeightTransferUpdateInfo):
    """The version that all ranks make live."""

    version: int


class UnickptTransferEngine(WeightTransferEngine):
    """Makes a version live on all ranks of an engine, or on none.

    `receive_weights` stages the version beside the live weights and verifies it. When all ranks
    are ready, each flips; if one is not, none does. The model must have been loaded with the load
    format "unickpt". After an error, call `finish_weight_update`, which ends the update.
    """

    init_info_cls = FollowerInitInfo
    update_info_cls = FollowerUpdateInfo
    supports_draft_weight_update = False

    follower: Follower | None = None

    def init_transfer_engine(self, init_info: FollowerInitInfo) -> None:
        """Opens the follower of this rank.

        Raises:
            UnsupportedFormat: the live parameters are not what was loaded, as with quantization.
        """
        self.shutdown()
        self.follower = Follower(
            init_info.root,
            live_tree(self.model, "vLLM", _START),
            rules=rules_named(init_info.rules),
            rank=self.parallel_config.rank,
            keep_copies=init_info.keep_copies,
            lease_s=init_info.lease_s,
            swap=init_info.swap,
        )

    def start_weight_update(self) -> None:
        """Does nothing: all is staged by `receive_weights`."""

    def receive_weights(self, update_info: FollowerUpdateInfo) -> None:
        """Makes a version live.

        With several ranks, only the last one raises: vLLM's executor reads no answer after the
        first error, and would take it for that of a later call.

        Raises:
            UnickptError: it is missing or damaged, or does not fit, on this rank or another one;
                the old version stays live on all.
            ValueError: `init_transfer_engine` was not called.
        """
        group = get_world_group()
        error: Exception | None
        if self.follower is None:
            error = ValueError("call init_weight_transfer_engine with the publisher's root first")
        else:
            error = make_live(self.follower, update_info.version, group)
        if error is not None:
            if (group.rank_in_group + 1) % self.parallel_config.world_size == 0:
                raise error
            _log.error("%s", error)

    def finish_weight_update(self) -> None:
        """Does nothing: the version is live."""

    def shutdown(self) -> None:
        """Closes the follower; the live version stays."""
        if self.follower is not None:
            self.follower.close()
            self.follower = None


# --- the trainer's side ---------------------------------------------------------------------------


@dataclass
class PublisherInitInfo(TrainerInitInfo):
    """Where a trainer publishes; see `Publisher`.

    Arguments:
        root, keep_last: as for `Publisher`.
        rules: from the trainer's names to Hugging Face's: a preset's name, a file, or text.
        rank: of this process.
    """

    backend: ClassVar[str] = NAME

    root: str
    rules: str | None = None
    keep_last: int | None = None


class UnickptTrainerEngine(TrainerWeightTransferEngine):
    """Publishes versions, and has the engine make them live.

    Arguments:
        publisher: the job's.
        client, source, is_sender: as for vLLM's.
    """

    init_info_cls = PublisherInitInfo

    def __init__(
        self, publisher: Publisher, *, client: Any, source: Any = None, is_sender: bool = True
    ) -> None:
        super().__init__(client=client, source=source, is_sender=is_sender)
        self.publisher = publisher

    @classmethod
    def trainer_init(
        cls, init_info: PublisherInitInfo, *, client: Any, source: Any = None
    ) -> UnickptTrainerEngine:
        """Opens the publisher, and the followers of the engine; on all ranks of the trainer."""
        rules = rules_named(init_info.rules)
        publisher = Publisher(init_info.root, rules, keep_last=init_info.keep_last)
        if init_info.is_sender:
            client.init_weight_transfer_engine({"root": init_info.root})
        return cls(publisher, client=client, source=source, is_sender=init_info.is_sender)

    def send_weights(self, state: Any = None) -> int:
        """Publishes the next version, and waits until it is live.

        Arguments:
            state: what to publish, as for `Publisher.publish`: nothing of it is gathered. By
                default the source's tensors, which gathers each.

        Returns:
            The version's number.

        Raises:
            UnickptError: as `Publisher.publish`, or by the engine, whose old version stays live.
        """
        version = max(self.publisher.versions(), default=-1) + 1
        state = dict(self.source) if state is None else state
        self.publisher.publish(version, state).result()
        if self.is_sender:
            self.client.start_weight_update()
            try:
                self.client.update_weights({"version": version})
            except Exception:
                with suppress(Exception):  # of the ranks that raised; it ends the others' update
                    self.client.finish_weight_update()
                raise
            self.client.finish_weight_update(weight_version=str(version))
        return version

    def shutdown(self) -> None:
        """Closes the publisher."""
        self.publisher.close()
