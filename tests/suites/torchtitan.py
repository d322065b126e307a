"""torchtitan 0.3.0 (commit 862f966a3): its tests of its checkpoint manager.

`CheckpointManager` of torchtitan.components.checkpointer, of its module dcp, and of the older
torchtitan.components.checkpoint is unickpt's.
"""

from __future__ import annotations

FILES = ("tests/unit_tests/test_checkpoint.py",)

_COUNTS = "mocks torch.distributed.checkpoint, and counts its calls"
_EMPTY = "the checkpoints to load are empty files or folders, and the load is a mock"

REASONS: dict[str, str] = {
    "*test_enable_first_step_checkpoint": _COUNTS,
    "*test_interval_respects_interval": _COUNTS,
    "*test_load_only_prevents_saving": _COUNTS,
    "*test_non_persist_buffer_not_saved": _COUNTS,
    "*test_nonzero_rank_does_not_purge_or_save": _COUNTS,
    "*test_load_finds_latest_and_calls_dcp_load": _EMPTY,
    "*test_initial_load_path_*": _EMPTY,
    "*test_async_save_calls_maybe_wait_for_saving": "mocks async_save; its futures are mocks",
    "*test_async_save_with_pinned_mem_*": "mocks async_save, and the stager; its futures are mocks",
    "*test_load_returns_false_when_no_checkpoint_folder": "compares a line of torchtitan's log",
    "*test_last_save_model_only_and_initial*": "looks for a folder step-1, ours is step_1; and "
    "counts calls",
    "*test_save_and_purge_keeps_last_k_checkpoints": "looks for folders step-2 and step-3, ours "
    "are step_2 and step_3; and counts calls",
    "*test_trainer_uses_checkpoint_interface*": "the class that a trainer has by default; ours is "
    "chosen by --override.imports or by a configuration",
    "*test_legacy_config_only_adds_dcp_specific_fields": "lists the fields; ours has local and "
    "reuse, too",
    "*test_remote_hf_rejected": "HF files on remote storage work here",
    "*TestFindLoadStepRemote*": "calls a private method, which looks into fsspec's memory",
}


def prepare() -> None:
    from support import titan_job  # torchtitan on CPUs

    assert titan_job


def redirect() -> None:
    import torchtitan.components.checkpoint as legacy
    from torchtitan.components import checkpointer
    from torchtitan.components.checkpointer import dcp

    from unickpt.integrations.torchtitan import CheckpointManager

    for module in (legacy, checkpointer, dcp):
        module.CheckpointManager = CheckpointManager
