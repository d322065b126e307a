"""Live weights: a training job publishes versions, and inference engines follow them."""

from unickpt.plugins.weights.follower import Follower, UpdateReport
from unickpt.plugins.weights.proof import WeightsCheck, array_sha256
from unickpt.plugins.weights.publisher import Publisher

__all__ = ["Follower", "Publisher", "UpdateReport", "WeightsCheck", "array_sha256"]
