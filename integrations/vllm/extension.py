"""A worker extension: asks each rank of an engine which version it has, bit for bit."""

from __future__ import annotations

from typing import Any

from unickpt.integrations.vllm.transfer import UnickptTransferEngine


class LiveWeights:
    """`worker_extension_cls="unickpt.integrations.vllm.extension.LiveWeights"` gives each worker
    of vLLM the method `live_weights`: `llm.collective_rpc("live_weights")`."""

    weight_transfer_engine: Any

    def live_weights(self) -> dict[str, Any] | None:
        """The live version, the arrays that differ from it, and the sha256 of all in memory; None
        if no version is live.

        Raises:
            UnickptError: as `Follower.check`.
        """
        engine = self.weight_transfer_engine
        follower = engine.follower if isinstance(engine, UnickptTransferEngine) else None
        if follower is None or follower.version is None:
            return None
        check = follower.check()
        return {"version": check.version, "differing": check.differing, "sha256": dict(check.live)}
