"""A format and two codecs of Acme's, for unickpt."""

from acme_checkpoints.delta_codec import DeltaCodec
from acme_checkpoints.gzip_codec import GzipCodec

__all__ = ["DeltaCodec", "GzipCodec"]
