"""A codec that Zarr lacks: sorted integers, as zlib of their differences.

The entry point `unickpt.codecs` lets every program read its arrays; without this package unickpt
refuses them by the codec's name.
"""

import zlib

import numpy as np

from unickpt import extend
from unickpt.errors import UnsupportedLeaf


class DeltaCodec(extend.SaveFeature):
    """Stores int64 arrays of one dimension: `SaveOptions(features=[DeltaCodec("*/offsets")])`."""

    name = "acme-delta"

    def __init__(self, pattern="unused"):
        self.pattern = pattern

    def configure(self, entry):
        if not extend.name_matches(self.pattern, entry.name):
            return None
        if entry.dtype != "int64" or len(entry.shape) != 1:
            stored = entry.dtype_and_shape
            raise ValueError(f"acme-delta stores int64 of one dimension, not {stored}")
        return {"level": 9}

    def zarr_codec(self, settings):
        return None

    def encode(self, entry, chunk):
        delta = np.diff(chunk, prepend=np.int64(0))
        if (np.cumsum(delta) != chunk).any():
            raise UnsupportedLeaf(f"array {entry.name!r}: its differences overflow")
        data = zlib.compress(delta.tobytes(), entry.settings["level"])
        return extend.StoredChunk(np.frombuffer(data, np.uint8), {"chunks": 1})

    def decode(self, entry, data, out):
        try:
            decoder = zlib.decompressobj()
            raw = decoder.decompress(data.tobytes(), out.nbytes + 1)  # never more than fits
            if len(raw) != out.nbytes:
                raise extend.NotDecodable(f"{len(raw)} bytes of differences, not {out.nbytes}")
            np.cumsum(np.frombuffer(raw, np.int64), out=out)
        except zlib.error as error:
            raise extend.NotDecodable(str(error)) from None

    def stored_bytes(self, entry, shape):
        return None  # it depends on the elements

    def merge(self, notes):
        return {"chunks": sum(note["chunks"] for note in notes)}

    def validate(self, entry, note):
        if entry.settings.keys() != {"level"} or not isinstance(note, dict):
            raise ValueError(f"acme-delta has the settings {entry.settings} and the note {note!r}")

    def facts(self, entry):
        return {**entry.settings, **entry.extra[self.name]}


CODEC = DeltaCodec()
