"""Nodes that do not answer, so that their files are read elsewhere."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from urllib.parse import urlsplit
from urllib.request import urlopen

from unickpt.plugins.nodes.membership import NodeProcess
from unickpt.plugins.nodes.node_folder import NODE_FILE

_log = logging.getLogger("unickpt")
_ANSWERS_S, _KNOWN_S, _AT_ONCE = 3.0, 10.0, 32
# TensorStore's requests have no other timeouts, those to S3 neither, which is slower to answer than
# a node. It reads these when it makes the first one.
_TIMEOUTS = {
    "CONNECT_TIMEOUT_SECONDS": "5",
    "LOW_SPEED_TIME_SECONDS": "10",
    "LOW_SPEED_LIMIT_BYTES": "1",
}


def place_of(url: str) -> str:
    """The node of a URL, for messages: without the secret."""
    return f"the node at {urlsplit(url).netloc}"


class SilentNodes:
    """The nodes that do not answer to this process."""

    def __init__(self) -> None:
        for name, value in _TIMEOUTS.items():
            os.environ.setdefault(f"TENSORSTORE_CURL_{name}", value)
        self._seen: dict[str, tuple[float, str]] = {}
        """By URL, when it was asked, and why it is silent; empty if it answered."""
        self.nodes: list[str] = []
        """Their identities."""

    def among(self, members: Iterable[NodeProcess], *, again: bool = False) -> dict[str, str]:
        """The URLs of those that do not answer within seconds, and why; a warning names them.

        Arguments:
            members: which are asked, all at once.
            again: whether those are asked that answered a moment ago.
        """
        by_url = {member.url: member for member in members}
        old = time.monotonic() - (0.0 if again else _KNOWN_S)
        urls = [url for url in by_url if self._seen.get(url, (-1.0, ""))[0] < old]
        if urls:
            pool = ThreadPoolExecutor(min(len(urls), _AT_ONCE), "unickpt asks nodes")
            answers = {url: pool.submit(_why_silent, by_url[url]) for url in urls}
            rounds = -(-len(urls) // _AT_ONCE)
            wait(answers.values(), _ANSWERS_S * rounds + 1.0)
            pool.shutdown(wait=False, cancel_futures=True)
            for url, answer in answers.items():
                reason = answer.result() if answer.done() else "no answer in time"
                if reason and not self._seen.get(url, (0.0, ""))[1]:
                    _log.warning("%s does not answer and is not read: %s", place_of(url), reason)
                self._seen[url] = time.monotonic(), reason
            self.nodes = sorted({by_url[u].node for u in by_url if self._seen[u][1]})
        return {url: reason for url in by_url if (reason := self._seen[url][1])}


def _why_silent(member: NodeProcess) -> str:
    """Why a node does not answer; empty if it does."""
    try:
        with urlopen(member.url + NODE_FILE, timeout=_ANSWERS_S) as response:
            text = response.read(len(member.node) + 1).decode()
        return "" if text == member.node else "it answers as another program would"
    except Exception as error:  # whatever it is that answers
        return str(getattr(error, "reason", error)) or type(error).__name__
