"""A small transformer that was trained, with its optimizer: what benchmarks of stored bits measure.

    python benchmarks/trained.py state.npz --seconds 120    # trains on the library's own text

Random numbers compress and quantise differently from trained weights, so these are trained: a
decoder of 4 layers on bytes of text, with AdamW, on one thread.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

WIDTH, HEADS, LAYERS, LENGTH, BATCH = 128, 4, 4, 96, 16
ROOT = Path(__file__).parent.parent


class Model(nn.Module):
    """A decoder over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(LAYERS)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, given: Any) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(given.shape[1])
        x = self.embed(given) + self.place(torch.arange(given.shape[1]))
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


class Training:
    """A model, its optimizer and its text; a step of the same number has the same batch.

    Arguments:
        text: bytes to learn.
    """

    def __init__(self, text: bytes) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.model = Model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3, weight_decay=0.1)
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def step(self, number: int) -> float:
        """One step; returns the loss before it."""
        chosen = torch.Generator().manual_seed(number)
        starts = torch.randint(len(self._text) - LENGTH - 1, (BATCH,), generator=chosen)
        rows = torch.stack([self._text[a : a + LENGTH + 1] for a in starts.tolist()]).long()
        logits = self.model(rows[:, :-1])
        loss = nn.functional.cross_entropy(logits.reshape(-1, 256), rows[:, 1:].reshape(-1))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """Weights and moments, named as in `unpack`."""
        found = {}
        for name, weight in self.model.named_parameters():
            found[f"weights/{name}"] = weight.detach().numpy().copy()
            for slot, value in self.optimizer.state[weight].items():
                found[f"{slot}/{name}"] = value.numpy().copy()
        return found

    def unpack(self, found: dict[str, np.ndarray[Any, Any]]) -> None:
        """Continues from weights and moments."""
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                weight.copy_(torch.from_numpy(np.asarray(found[f"weights/{name}"])))
                self.optimizer.state[weight] = {
                    slot: torch.from_numpy(np.array(found[f"{slot}/{name}"]))
                    for slot in ("step", "exp_avg", "exp_avg_sq")
                }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--seconds", type=float, default=120, help="of the processor")
    options = parser.parse_args()
    files = sorted([*ROOT.glob("unickpt/**/*.py"), *ROOT.glob("docs/**/*.md")])
    text = b"".join(file.read_bytes() for file in files)
    training, number, losses = Training(text), 0, list[float]()
    while time.process_time() < options.seconds:
        losses.append(training.step(number))
        number += 1
    np.savez(options.file, text=np.frombuffer(text, np.uint8), **training.arrays())
    count = sum(p.numel() for p in training.model.parameters())
    recent = sum(losses[-20:]) / len(losses[-20:])
    print(f"{count} parameters, {number} steps, loss {losses[0]:.2f} -> {recent:.2f}")


if __name__ == "__main__":
    main()
