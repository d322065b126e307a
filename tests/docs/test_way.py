"""How many files and calls a warm save and a warm load enter: only what they need."""

from __future__ import annotations

import json

import pytest
from support.processes import Processes

TRACED = """
import json, os, shutil, sys, tempfile, threading
import numpy as np, torch, torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
import unickpt

what, top = sys.argv[1], os.path.dirname(os.path.realpath(unickpt.__file__))
links = [f"{top}/{each}" for each in ("adapters", "backends", "integrations", "plugins")]
tops = tuple(os.path.realpath(p) + os.sep for p in (top, *links))
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
mesh = init_device_mesh("cpu", (1,))
weights = distribute_tensor(torch.ones(4096, 256), mesh, [Shard(0)])
options = unickpt.SaveOptions(fsync=False)
path = tempfile.mkdtemp()
state = {"w": weights, "step": 3}
paths, entered = {}, {}

def profiler(frame, event, argument):
    code = frame.f_code
    if event == "call" and code.co_name != "<module>":
        name = code.co_filename
        if name not in paths:
            real = os.path.realpath(name)
            paths[name] = real if real.startswith(tops) else None
        if paths[name] is not None:
            entered[paths[name]] = entered.get(paths[name], 0) + 1

def walk(work):
    threading.setprofile(profiler)
    sys.setprofile(profiler)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)

if what == "save":
    unickpt.save(f"{path}/0", state, options=options)
    walk(lambda: unickpt.save(f"{path}/1", state, options=options))
elif what == "load":
    unickpt.save(f"{path}/0", state, options=options)
    unickpt.load(f"{path}/0", state)
    walk(lambda: unickpt.load(f"{path}/0", state))
elif what == "rules":
    unickpt.save(f"{path}/0", {"params": {"up": {"kernel": torch.ones(512, 256)}}}, options=options)
    rules = unickpt.Rules.parse("params/{m...}/kernel [i o] <-> {m...}.weight [o i]")
    like = {"up.weight": torch.zeros(256, 512)}
    unickpt.load(f"{path}/0", like, rules=rules)
    walk(lambda: unickpt.load(f"{path}/0", like, rules=rules))
else:
    with unickpt.Checkpointer(f"{path}/run", keep_last=2, options=options) as checkpointer:
        checkpointer.save(1, state).result()
        walk(lambda: (checkpointer.save(2, state).result(), checkpointer.wait()))
print(json.dumps(entered, sort_keys=True))
shutil.rmtree(path)
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("what", "most", "calls"),
    [
        ("save", 35, 601),
        ("load", 23, 387),
        ("rules", 40, 1064),
        ("Checkpointer.save", 45, 802),
    ],
)
def test_the_way_is_short(what: str, most: int, calls: int, processes: Processes) -> None:
    """A feature is a module at one seam: a save or a load that does not use it does not enter it.

    If this fails because the way got longer, say why in the commit, or make it shorter again.
    """
    (out,) = processes.finish([processes.forked(TRACED, what, of=("torch",))])
    entered = json.loads(out.splitlines()[-1])
    assert len(entered) <= most, "\n".join(entered)
    assert sum(entered.values()) <= calls, entered
    assert what == "rules" or not any("/unickpt/rules/" in file for file in entered), entered
