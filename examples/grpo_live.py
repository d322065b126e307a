"""python examples/grpo_live.py [folder]

TRL's GRPOTrainer publishes its weights. An engine in a second process serves each version, while
training continues. The tiny model is random; it learns to say "yes"."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # each of the two processes has a core

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from unickpt.plugins.weights import Follower, Publisher

STEPS = 20
WORDS = ["<pad>", "<eos>", "yes", "no", "may", "it", "be", "so", "now", "then", *"abcdef"]


def new_model() -> LlamaForCausalLM:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"vocab_size": len(WORDS), "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    config = LlamaConfig(**sizes, **tokens, intermediate_size=128, tie_word_embeddings=True)
    return LlamaForCausalLM(config)


def new_tokenizer() -> PreTrainedTokenizerFast:
    words = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def share_of_yes(completions: list[str], **columns: object) -> list[float]:
    return [text.split().count("yes") / 8 for text in completions]


def train(folder: str) -> None:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from unickpt.integrations.transformers import PublishWeights

    torch.manual_seed(0)
    arguments = GRPOConfig(
        f"{folder}/trainer",
        max_steps=STEPS,
        per_device_train_batch_size=16,
        num_generations=8,
        max_completion_length=8,
        learning_rate=1e-2,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    prompts = Dataset.from_dict({"prompt": ["may it be so", "now then", "a b c", "d e f"] * 8})
    with Publisher(f"{folder}/weights", keep_last=3) as publisher:
        trainer = GRPOTrainer(
            new_model(),
            reward_funcs=share_of_yes,
            args=arguments,
            train_dataset=prompts,
            processing_class=new_tokenizer(),
            callbacks=[PublishWeights(publisher)],  # the changed line
        )
        while not Path(folder, "engine").exists():
            time.sleep(0.05)
        trainer.train()


def serve(folder: str) -> None:
    model, tokenizer = new_model().eval(), new_tokenizer()
    prompts = tokenizer(["may it be so"] * 64, return_tensors="pt").input_ids
    model.generate(prompts, max_new_tokens=1)
    Path(folder, "engine").touch()  # it is ready
    with Follower(f"{folder}/weights", model) as follower:
        while follower.version != STEPS:
            if not follower.update():  # between two requests
                time.sleep(0.05)
                continue
            texts = tokenizer.batch_decode(
                model.generate(prompts, do_sample=True, max_new_tokens=8)[:, prompts.shape[1] :]
            )
            exact = "bit for bit" if follower.check().ok else "NOT what was published"
            says_yes = sum(share_of_yes(texts)) / len(texts)
            print(f"engine: version {follower.version}, {exact}, says yes {says_yes:.0%}")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="grpo-live-") as temporary:
        folder = sys.argv[1] if sys.argv[1:] else temporary
        source = f"import grpo_live; grpo_live.serve({folder!r})"
        engine = subprocess.Popen([sys.executable, "-u", "-c", source], cwd=Path(__file__).parent)
        try:
            train(folder)
            engine.wait(60)
        finally:
            engine.kill()
        sys.exit(engine.returncode)


if __name__ == "__main__":
    main()
