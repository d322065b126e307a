"""torch 2.13: tests of torch.distributed.checkpoint of PyTorch, on CPUs with gloo.

`save`, `load`, `async_save`, `save_state_dict`, `load_state_dict`, `FileSystemWriter` and
`FileSystemReader` are those of unickpt.integrations.dcp, as if it were imported instead.
"""

from __future__ import annotations

from suites._dcp import FILES, OVERWRITE, prepare, redirect_classes, redirect_functions

__all__ = ["FILES", "REASONS", "prepare", "redirect"]

_SHARDED = "saves a ShardedTensor, which is refused by name; DTensors are stored"

REASONS: dict[str, str] = {
    "*test_file_system_checkpoint_cpu.py::TestDistributedStateDictSaveLoadWithSharedTensor::*": (
        _SHARDED
    ),
    "*test_file_system_checkpoint_cpu.py::TestDistributedReshardOnLoad::*": _SHARDED,
    "*test_e2e_async_cached*type2*": "AsyncCheckpointerType.PROCESS, which is refused by name",
    **OVERWRITE,
}


def redirect() -> None:
    redirect_classes()
    redirect_functions()
