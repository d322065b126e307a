"""An engine of vLLM in a process of its own: does what a JSON file says, and writes what it saw.

python engine_job.py settings.json results.json
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def main() -> None:
    from vllm import LLM, SamplingParams

    settings = json.loads(Path(sys.argv[1]).read_text())
    llm = LLM(
        **settings["engine"], skip_tokenizer_init=True, enforce_eager=True, dtype="float32",
        max_model_len=64, max_num_seqs=4, enable_prefix_caching=False,
        worker_extension_cls="unickpt.integrations.vllm.extension.LiveWeights",
    )  # fmt: skip
    sampling = SamplingParams(temperature=0, max_tokens=12, detokenize=False, ignore_eos=True)
    prompts: Any = [{"prompt_token_ids": [1, 2, 3, i]} for i in range(4)]

    def state() -> dict[str, Any]:
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        return {"tokens": tokens, "ranks": llm.collective_rpc("live_weights")}

    seen = [state()]
    if "trains" in settings:
        seen += [
            {**state(), "weight_version": llm.get_weight_version()} for _ in train(llm, settings)
        ]
    elif "root" in settings:
        try:
            llm.init_weight_transfer_engine({"init_info": {"root": settings["root"]}})
        except Exception as raised:
            seen[0]["error"] = str(raised)
    for update in settings.get("updates", []):
        llm.start_weight_update()
        error, version = None, update["version"] if isinstance(update, dict) else "ranks differ"
        try:
            llm.update_weights({"update_info": update})
            llm.finish_weight_update(weight_version=str(version))
        except Exception as raised:
            error = str(raised)
            with suppress(Exception):
                llm.finish_weight_update()
        seen.append({**state(), "error": error, "weight_version": llm.get_weight_version()})
    Path(sys.argv[2]).write_text(json.dumps(seen))
    with suppress(Exception):
        llm.llm_engine.engine_core.shutdown()


def train(llm: Any, settings: dict[str, Any]) -> Iterator[int]:
    """Changes a model and sends it, twice."""
    import torch
    import transformers
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from unickpt.integrations.vllm.transfer import PublisherInitInfo

    class Client:
        def init_weight_transfer_engine(self, init_info: Any) -> None:
            llm.init_weight_transfer_engine({"init_info": init_info})

        def start_weight_update(self) -> None:
            llm.start_weight_update()

        def update_weights(self, update_info: Any) -> None:
            llm.update_weights({"update_info": update_info})

        def finish_weight_update(self, weight_version: str | None = None) -> None:
            llm.finish_weight_update(weight_version)

    model = transformers.AutoModelForCausalLM.from_pretrained(settings["trains"])
    trainer = WeightTransferTrainerFactory.trainer_init(
        PublisherInitInfo(root=settings["root"], rank=0),
        client=Client(),
        source=ModuleSource(model),
    )
    for state in (None, model):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        yield trainer.send_weights() if state is None else trainer.send_weights(state)
    trainer.shutdown()


if __name__ == "__main__":
    main()
