"""Seals: digests beside the files of a safetensors or GGUF folder, which every load checks."""

from unickpt.plugins.seal.sealing import SealReport, check_seal, seal

__all__ = ["SealReport", "check_seal", "seal"]
