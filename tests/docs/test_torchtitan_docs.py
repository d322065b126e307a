"""The example of docs/integrations/torchtitan.md runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support import TESTS
from support.processes import Processes

pytest.importorskip("torchtitan")
pytestmark = pytest.mark.integration
PAGE = Path(TESTS).parent.joinpath("docs", "integrations", "torchtitan.md").read_text()
(EXAMPLE,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
ALSO = """
from torchtitan.config.override import _REGISTRY
assert type(checkpoint).__qualname__ == "TorchtitanCheckpointManager.Config"
assert "unickpt.integrations.torchtitan.manager" in _REGISTRY
"""


def test_the_configuration(processes: Processes) -> None:
    root = Path(TESTS).parent
    head = f"import sys; sys.path.insert(0, {str(root)!r})\n"
    processes.finish([processes.start(head + EXAMPLE + ALSO)])
