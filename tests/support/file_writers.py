"""Files of other systems' formats, written without their libraries."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from unickpt.backends._files.pickle_writer import PickledCall, dumps
from unickpt.backends._files.pickles import Global, PersistentId

KINDS = {"float32": "Float", "float64": "Double", "int64": "Long", "uint8": "Byte", "bool": "Bool"}
SAFETENSORS = {"float32": "F32", "float64": "F64", "int64": "I64", "uint8": "U8", "bool": "BOOL"}


def safetensors(arrays: Mapping[str, np.ndarray]) -> bytes:
    header: dict[str, Any] = {}
    at = 0
    for name, array in arrays.items():
        header[name] = {
            "dtype": SAFETENSORS[array.dtype.name],
            "shape": array.shape,
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(a.tobytes() for a in arrays.values())


class TorchPickle:
    """What torch.save makes of a value in which arrays stand for tensors.

    Arguments:
        value: containers, plain values, calls and arrays.
        view: what follows in the persistent ids of the old format.
    """

    def __init__(self, value: Any, *view: Any) -> None:
        self.storages: dict[str, np.ndarray] = {}
        self._view = view
        self.data = dumps(self._facts(value))

    def _facts(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            key = str(len(self.storages))
            self.storages[key] = value
            kind = Global(f"torch.{KINDS[value.dtype.name]}Storage")
            storage = PersistentId(("storage", kind, key, "cpu", value.size, *self._view))
            strides = tuple(s // value.itemsize for s in np.empty(value.shape, value.dtype).strides)
            hooks = PickledCall(Global("collections.OrderedDict"))
            args = (storage, 0, value.shape, strides, False, hooks)
            return PickledCall(Global("torch._utils._rebuild_tensor_v2"), args)
        if isinstance(value, dict):
            return {k: self._facts(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(self._facts, value))
        if isinstance(value, PickledCall):
            args, state = self._facts(value.args), self._facts(value.state)
            return PickledCall(
                value.function, args, state, value.appended, value.items, value.is_new
            )
        return value


def torch_zip(value: Any) -> bytes:
    pickled, out = TorchPickle(value), io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("archive/data.pkl", pickled.data)
        archive.writestr("archive/byteorder", "little")
        for key, array in pickled.storages.items():
            archive.writestr(f"archive/data/{key}", array.tobytes())
    return out.getvalue()


def torch_legacy(value: Any) -> bytes:
    pickled = TorchPickle(value, None)
    info = {"protocol_version": 1001, "little_endian": True, "type_sizes": {"int": 4}}
    head = [dumps(0x1950A86A20F9469CFC6C), dumps(1001), dumps(info)]
    storages = [
        array.size.to_bytes(8, "little") + array.tobytes() for array in pickled.storages.values()
    ]
    return b"".join([*head, pickled.data, dumps(list(pickled.storages)), *storages])
