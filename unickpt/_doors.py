"""The entry points of unickpt itself; `make doors` makes this of pyproject.toml."""

DOORS = {
    "formats": {
        "orbax": "unickpt.backends.orbax.reader",
        "bytecheckpoint": "unickpt.backends.bytecheckpoint.reader",
        "megatron": "unickpt.backends.megatron.reader",
        "dcp": "unickpt.backends.dcp.reader",
        "deepspeed": "unickpt.backends.deepspeed.reader",
        "safetensors": "unickpt.backends.safetensors.reader",
        "torch": "unickpt.backends.torch_files",
        "flax-msgpack": "unickpt.backends.flax_msgpack",
        "hdf5": "unickpt.backends.hdf5.reader",
        "gguf": "unickpt.backends.gguf",
        "npz": "unickpt.backends.npz",
        "npy": "unickpt.backends.npy",
    },
    "writers": {
        "hf": "unickpt.backends.safetensors.writer:HuggingFaceWriter",
        "safetensors": "unickpt.backends.safetensors.writer:SafetensorsWriter",
        "dcp": "unickpt.backends.dcp.writer:DcpWriter",
        "orbax": "unickpt.backends.orbax.step_writer:OrbaxWriter",
        "keras": "unickpt.backends.orbax.keras_writer:KerasWriter",
        "torch": "unickpt.backends.torch_files:TorchWriter",
        "lightning": "unickpt.backends.lightning_writer:LightningWriter",
        "npz": "unickpt.backends.npz:NpzWriter",
        "universal": "unickpt.backends.deepspeed.writer:UniversalWriter",
        "trainer": "unickpt.backends.trainer_writer:TrainerWriter",
        "accelerate": "unickpt.backends.accelerate_writer:AccelerateWriter",
    },
    "refusals": {
        "other-kinds": "unickpt.backends._files.other_kinds",
    },
    "schemes": {
        "file": "unickpt.backends.file:SCHEME",
        "memory": "unickpt.backends.memory:SCHEME",
        "s3": "unickpt.backends.s3:SCHEME",
        "gs": "unickpt.backends.gs:SCHEME",
    },
    "presets": {
        "unickpt": "unickpt.rules.presets",
    },
    "codecs": {
        "quantized": "unickpt.plugins.quantize:CODEC",
    },
    "features": {
        "quantize": "unickpt.plugins.quantize:Quantize",
    },
}
