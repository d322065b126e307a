"""The entry points of unickpt itself; `make doors` makes this of pyproject.toml."""

DOORS = {
    "formats": {
        "sealed": "unickpt.plugins.seal.sealed_format",
        "orbax": "unickpt.backends.orbax.reader",
        "bytecheckpoint": "unickpt.backends.dcp.bytecheckpoint.reader",
        "megatron": "unickpt.backends.dcp.megatron.reader",
        "dcp": "unickpt.backends.dcp.reader",
        "deepspeed": "unickpt.backends.deepspeed.reader",
        "archive": "unickpt.backends.archives.reader",
        "safetensors": "unickpt.backends.safetensors.reader",
        "torch": "unickpt.backends.torch.reader",
        "flax-msgpack": "unickpt.backends.flax.reader",
        "hdf5": "unickpt.backends.hdf5.reader",
        "gguf": "unickpt.backends.gguf.reader",
        "npz": "unickpt.backends.numpy.npz",
        "equinox": "unickpt.backends.numpy.equinox",
        "npy": "unickpt.backends.numpy.npy",
        "pickle": "unickpt.backends.pickles.reader",
        "onnx": "unickpt.backends.onnx.reader",
    },
    "writers": {
        "hf": "unickpt.backends.safetensors.writer:HuggingFaceWriter",
        "safetensors": "unickpt.backends.safetensors.writer:SafetensorsWriter",
        "dcp": "unickpt.backends.dcp.writer:DcpWriter",
        "orbax": "unickpt.backends.orbax.step_writer:OrbaxWriter",
        "keras": "unickpt.backends.orbax.keras_writer:KerasWriter",
        "torch": "unickpt.backends.torch.writer:TorchWriter",
        "lightning": "unickpt.backends.trainers.lightning:LightningWriter",
        "npz": "unickpt.backends.numpy.npz:NpzWriter",
        "universal": "unickpt.backends.deepspeed.writer:UniversalWriter",
        "trainer": "unickpt.backends.trainers.transformers:TrainerWriter",
        "accelerate": "unickpt.backends.trainers.accelerate:AccelerateWriter",
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
    "tiers": {
        "nodes": "unickpt.plugins.nodes:join",
    },
    "presets": {
        "unickpt": "unickpt.rules.presets",
    },
    "codecs": {
        "quantized": "unickpt.plugins.quantize:CODEC",
    },
    "commands": {
        "report": "unickpt.plugins.report.command:app",
        "merge": "unickpt.plugins.merge.command:app",
        "rules": "unickpt.plugins.observe.command:app",
        "doctor": "unickpt.plugins.doctor.command:app",
        "watch": "unickpt.plugins.watch.command:app",
        "repair": "unickpt.plugins.parity.command:app",
        "seal": "unickpt.plugins.seal.command:app",
    },
    "names": {
        "export": "unickpt.plugins.export.exporting:export",
        "merge": "unickpt.plugins.merge:merge",
        "merge_methods": "unickpt.plugins.merge.methods",
        "Experts": "unickpt.plugins.experts:Experts",
        "Restores": "unickpt.plugins.quantize:Restores",
        "repair": "unickpt.plugins.parity.repairing:repair",
        "find_nonfinite": "unickpt.plugins.nonfinite:find_nonfinite",
        "report": "unickpt.plugins.report.html_report:report",
        "data": "unickpt.plugins.data",
        "observe": "unickpt.plugins.observe.observe:observe",
        "draft_rules": "unickpt.plugins.observe.drafting:draft",
        "check_rules": "unickpt.plugins.observe.checking:check",
        "router_tokens_jax": "unickpt.plugins.experts.jax_routers:RouterTokens",
        "router_tokens_torch": "unickpt.plugins.experts.torch_routers:RouterTokens",
    },
    "encodings": {
        "auto": "unickpt.plugins.compress:Auto",
    },
    "reads": {
        "exchange": "unickpt.plugins.exchange",
    },
    "references": {
        "incremental": "unickpt.plugins.incremental:Incremental",
    },
    "values": {
        "patches": "unickpt.plugins.incremental.patches",
    },
    "features": {
        "quantize": "unickpt.plugins.quantize:Quantize",
        "experts": "unickpt.plugins.experts:Experts",
        "parity": "unickpt.plugins.parity:Parity",
    },
    "restorers": {
        "parity": "unickpt.plugins.parity.restoring:restorer_at",
    },
}
