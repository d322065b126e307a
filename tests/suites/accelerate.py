"""The tests of checkpoints of Hugging Face accelerate 1.15 (tests/test_state_checkpointing.py).

`Accelerator.save_state` and `load_state` are replaced by unickpt's; `safe_serialization=False`,
which pickles weights, is left out.
"""

from __future__ import annotations

from typing import Any

FILES = ("tests/test_state_checkpointing.py",)
REASONS: dict[str, str] = {}


def redirect() -> None:
    from accelerate import Accelerator

    from unickpt.integrations.accelerate import load_state, save_state

    def save(
        self: Any, output_dir: Any = None, safe_serialization: bool = True, **more: Any
    ) -> Any:
        return save_state(self, output_dir, **more)

    Accelerator.save_state, Accelerator.load_state = save, load_state
