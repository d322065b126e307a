"""The addresses by which nodes reach each other."""

from __future__ import annotations

import ipaddress
import os
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from unickpt.errors import StorageError
from unickpt.plugins.nodes.addresses import bypass_proxy, node_address
from unickpt.plugins.nodes.file_server import FileServer
from unickpt.plugins.nodes.peer_copies import fetched

READ = """
import sys
import tensorstore as ts
from unickpt.plugins.nodes.addresses import bypass_proxy
from unickpt.plugins.nodes.peer_copies import fetched
url = sys.argv[1]
bypass_proxy([url])
assert fetched(url + "d") == b"data"
retries = {"http_request_retries": {"max_retries": 1}}
spec = {"driver": "http", "base_url": url, "path": "", "context": retries}
store = ts.KvStore.open(spec).result()
assert store.read("d").result().value == b"data"
"""


def has_route() -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unsent:
        return unsent.connect_ex(("192.0.2.1", 9)) == 0


@pytest.mark.skipif(not has_route(), reason="this machine has no network")
def test_a_name_of_the_loopback_is_no_address_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Debian, where /etc/hosts gives 127.0.1.1 to a machine's own name."""
    monkeypatch.delenv("UNICKPT_NODE_ADDRESS", raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert not ipaddress.ip_address(node_address()).is_loopback


@pytest.mark.integration
@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "[::1]"])
def test_nodes_are_read_without_the_proxy_of_the_environment(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ":" in address and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    monkeypatch.setenv("UNICKPT_NODE_ADDRESS", address)
    (tmp_path / "d").write_bytes(b"data")
    server = FileServer(f"{tmp_path}/")
    proxy = {"http_proxy": "http://127.0.0.1:9", "NO_PROXY": "example.com"}
    command = [sys.executable, "-c", READ, server.url]
    subprocess.run(command, check=True, env={**os.environ, **proxy}, timeout=60)
    server.close()


def test_what_bypasses_the_proxy_already_still_does(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    bypass_proxy(["http://10.0.0.1:80/x/"])
    assert "no_proxy" not in os.environ
    monkeypatch.setenv("ALL_PROXY", "http://proxy")
    monkeypatch.setenv("NO_PROXY", "a.com,10.0.0.1")
    monkeypatch.setenv("no_proxy", "")  # so that it goes when the test ends
    bypass_proxy(["http://10.0.0.1:80/x/", "http://10.0.0.2:80/y/", "http://10.0.0.2:81/z/"])
    assert os.environ["no_proxy"] == "a.com,10.0.0.1,10.0.0.2"


def test_a_node_that_does_not_answer_is_named_without_its_secret(tmp_path: Path) -> None:
    server = FileServer(f"{tmp_path}/")
    url = server.url
    server.close()
    with pytest.raises(StorageError, match=urlsplit(url).netloc) as caught:
        fetched(url + "d")
    assert "refused" in str(caught.value)
    assert urlsplit(url).path not in str(caught.value)
