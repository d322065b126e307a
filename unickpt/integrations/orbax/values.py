"""Checkpointables of Orbax's version 1: trees, and objects that write files of their own."""

from __future__ import annotations

import asyncio
import inspect
import tempfile
import threading
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

from unickpt.integrations.orbax import args, handlers, items
from unickpt.integrations.orbax.items import FILES, StoredItem

STATE = "state"
_STATE = "state"
