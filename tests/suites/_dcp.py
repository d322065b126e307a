"""What the suites of torch.distributed.checkpoint have in common.

The files are those of PyTorch 2.1, but test_dtensor_resharding.py is of commit 0554fa805, and
e2e/test_e2e_save_and_load.py of commit 01357535d. Not all of their tests pass with torch 2.13.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
from typing import Any

FOLDER = "test/distributed/checkpoint/"
FILES = tuple(
    FOLDER + name
    for name in (
        "test_file_system_checkpoint_cpu.py",
        "test_file_system_checkpoint.py",
        "test_nested_dict.py",
        "test_planner.py",
        "test_checkpoint.py",
        "test_dtensor_checkpoint.py",
        "test_dtensor_resharding.py",
        "e2e/test_e2e_save_and_load.py",
    )
)
OVERWRITE = {
    "*::test_overwrite": "looks for torch's CheckpointException and its words; ours is "
    "CheckpointExists"
}
RANKS = 2  # where a test takes as many as there are devices


def prepare() -> None:
    """Lets tests run on CPUs with gloo which torch would skip there."""
    import torch
    from torch.testing._internal import common_distributed
    from torch.testing._internal.distributed._shard import sharded_tensor
    from torch.testing._internal.distributed._tensor import common_dtensor

    def as_it_is(*_: Any, **__: Any) -> Any:
        return lambda test: test

    with_comms = sharded_tensor.with_comms

    def with_gloo(func: Any = None, init_rpc: bool = True, backend: str = "gloo") -> Any:
        return with_comms(func, init_rpc=init_rpc, backend="gloo")

    for module in (common_distributed, common_dtensor):
        module.skip_if_lt_x_gpu = as_it_is
    common_distributed.requires_nccl = as_it_is
    sharded_tensor.with_comms = with_gloo
    common_dtensor.NUM_DEVICES = RANKS
    begin = torch.distributed.init_process_group

    def with_gloo_once(backend: Any = None, *more: Any, **named: Any) -> None:
        begin("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *more, **named)

    torch.distributed.init_process_group = with_gloo_once
    if not hasattr(common_dtensor, "_get_device_type"):  # newer than 2.13
        common_dtensor._get_device_type = lambda _: common_dtensor.DEVICE_TYPE
    if not torch.cuda.is_available():
        torch.nn.Module.cuda = torch.Tensor.cuda = lambda self, *_, **__: self
        _let_fsdp_use_cpus()
    # Ranks start in a tenth of the time, and with redirected imports.
    torch.multiprocessing.set_start_method("forkserver", force=True)  # not even torch's own forks
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["suites._ranks"])
    cases: Any = common_distributed.MultiProcessTestCase
    cases._spawn_processes = lambda self: self._start_processes(context.Process)


def _let_fsdp_use_cpus() -> None:
    """FSDP1 works on CPUs, but has to be told so."""
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel

    make = FullyShardedDataParallel.__init__

    def on_cpu(self: Any, *arguments: Any, **named: Any) -> None:
        make(self, *arguments, **{"device_id": torch.device("cpu")} | named)

    FullyShardedDataParallel.__init__ = on_cpu


def redirect_classes() -> None:
    import torch.distributed.checkpoint as theirs
    from torch.distributed.checkpoint import _storage_utils, filesystem

    if importlib.util.find_spec("fsspec"):
        from torch.distributed.checkpoint import _fsspec_filesystem

        assert _fsspec_filesystem  # derives from torch's own classes
    from unickpt.integrations import dcp

    for module in (theirs, filesystem, _storage_utils):  # the last: for checkpoint_id=
        module.FileSystemWriter = dcp.FileSystemWriter
        module.FileSystemReader = dcp.FileSystemReader


def redirect_functions() -> None:
    import torch.distributed.checkpoint as theirs
    from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

    from unickpt.integrations import dcp

    def save_state_dict(
        state_dict: Any,
        storage_writer: Any,
        process_group: Any = None,
        coordinator_rank: int = 0,
        no_dist: bool = False,
        planner: Any = None,
    ) -> Any:
        return dcp.save(
            state_dict,
            storage_writer=storage_writer,
            process_group=process_group,
            no_dist=no_dist,
            planner=planner,
        )

    def load_state_dict(
        state_dict: Any,
        storage_reader: Any,
        process_group: Any = None,
        coordinator_rank: int = 0,
        no_dist: bool = False,
        planner: Any = None,
    ) -> None:
        dcp.load(
            state_dict,
            storage_reader=storage_reader,
            process_group=process_group,
            no_dist=no_dist,
            planner=planner,
        )

    saving = {"save": dcp.save, "async_save": dcp.async_save, "save_state_dict": save_state_dict}
    loading = {"load": dcp.load, "load_state_dict": load_state_dict}
    for module, names in (
        (state_dict_saver, saving),
        (state_dict_loader, loading),
        (theirs, saving | loading),
    ):
        for name, function in names.items():
            setattr(module, name, function)
