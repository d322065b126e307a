"""A codec that writes gzip at level 9. Zarr has gzip, so every reader of Zarr reads its arrays."""

import gzip

import numpy as np

from unickpt import extend


class GzipCodec(extend.SaveFeature):
    """Compresses arrays whose names match a pattern: `SaveOptions(features=[GzipCodec("**")])`."""

    name = "acme-gzip"

    def __init__(self, pattern, level=9):
        self.pattern, self.level = pattern, level

    def configure(self, entry):
        return {"level": self.level} if extend.name_matches(self.pattern, entry.name) else None

    def zarr_codec(self, settings):
        return {"name": "gzip", "configuration": settings}

    def encode(self, entry, chunk):
        data = gzip.compress(np.ascontiguousarray(chunk), self.level, mtime=0)
        return extend.StoredChunk(np.frombuffer(data, np.uint8))

    def decode(self, entry, data, out):
        raise NotImplementedError("TensorStore decodes gzip")

    def stored_bytes(self, entry, shape):
        return None  # it depends on the elements
