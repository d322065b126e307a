"""The addresses by which the nodes of a job reach each other."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress
from urllib.parse import urlsplit

_FAR = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}  # of documentation


def node_address() -> str:
    """The address of this machine, as others reach it, as in a URL: `UNICKPT_NODE_ADDRESS`; else
    that of its name, or of its route to others, because Debian names the loopback."""
    address = os.environ.get("UNICKPT_NODE_ADDRESS") or next(_own_addresses(), "127.0.0.1")
    return f"[{address}]" if ":" in address and not address.startswith("[") else address


def _own_addresses() -> Iterator[str]:
    """Those that other machines may reach."""
    for family, far in _FAR.items():
        addresses = list[str]()
        with suppress(OSError):
            named = socket.getaddrinfo(socket.gethostname(), None, family, socket.SOCK_STREAM)
            addresses += [str(info[4][0]) for info in named]
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as unsent:
            unsent.connect((far, 9))
            addresses.append(unsent.getsockname()[0])
        for address in addresses:
            kind = ipaddress.ip_address(address)
            if not (kind.is_loopback or kind.is_link_local):
                yield address


def bypass_proxy(urls: Iterable[str]) -> None:
    """Lets no request to these URLs go through the proxy that `http_proxy` names. It is the only
    setting of TensorStore's requests."""
    names = {"http_proxy", "all_proxy"}
    if not names & {name.lower() for name in os.environ}:
        return
    direct = (os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or "").split(",")
    hosts = dict.fromkeys(str(urlsplit(url).hostname) for url in urls)
    for host in hosts:
        direct += [host, f"[{host}]"] if ":" in host else [host]
    os.environ["no_proxy"] = ",".join(filter(None, dict.fromkeys(direct)))
