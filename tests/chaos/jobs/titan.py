"""torchtitan's trainer with unickpt's manager, FSDP2."""

import os

import target
from support import titan_job
from support.processes import free_port

if target.WORLD == 1:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(alone, MASTER_PORT=str(free_port()))
os.environ.setdefault("LOCAL_RANK", str(target.RANK))
assets = titan_job.Path(f"{target.FOLDER}.assets.{target.RANK}")
if not assets.exists():
    titan_job.make_assets(assets)
settings = {
    "loader": "own",
    "checkpoint": {"interval": 1, "keep_latest_k": 2},
    "training": {"steps": target.STEPS},
}
trainer = titan_job.made_config(assets, target.FOLDER, settings).build()
manager = trainer.checkpointer
load, save = manager.load, manager.save


def loads(*arguments, **named):
    done = load(*arguments, **named)
    target.resumed(trainer.step)
    return done


def saves(step, *arguments, **named):
    save(step, *arguments, **named)  # which waits, as `async_mode` is "disabled"
    target.committed(step)


manager.load, manager.save = loads, saves
trainer.train()
trainer.close()
target.ended({k: v for part in trainer.model_parts for k, v in target.whole(part).items()})
target.leave()
