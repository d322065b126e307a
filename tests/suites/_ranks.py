"""Imported first by processes that tests start: redirects there as in the process of pytest."""

from __future__ import annotations

import os

from suites.recording import begin

if "UNICKPT_SUITE" in os.environ:
    try:
        begin()
    except ImportError as error:
        # A forkserver would go on without a word, and the ranks would test nothing of ours.
        raise RuntimeError(f"the imports are not redirected: {error}") from error
