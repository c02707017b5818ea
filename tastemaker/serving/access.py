"""Who may use a web server of this package: names in the Host header, origins of web pages, and the token.

A web page in a browser can reach a server on this machine under a name of its own (DNS rebinding), or send it a
request from its own origin. Both are visible in headers that a page cannot change.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import socket
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import Scope

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
HOST_HEADER = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^][:@/\s]+))(?::\d{1,5})?", re.IGNORECASE)  # name or address, port


@dataclass(frozen=True)
class AccessRules:
    """The names of a server in the Host header, and its token."""

    allowed_hosts: tuple[str, ...] = ()  # besides those of this machine; "*" allows any
    token: str = ""  # no token is required if empty

    def is_own_host(self, host: str, scope: Scope) -> bool:
        """Whether a Host header names this machine: its names, or the address that the client connected to."""
        names = {name.lower() for name in (*LOOPBACK_NAMES, socket.gethostname(), *self.allowed_hosts)}
        if "*" in names:
            return True
        match = HOST_HEADER.fullmatch(host)
        name = (match[1] or match[2]).lower() if match else ""
        return bool(name) and (name in names or name == (scope.get("server") or [""])[0])

    def is_own_origin(self, origins: Collection[str], host: str) -> bool:
        """Whether no Origin header names a page of another server than the one in the Host header."""
        return set(origins) <= {f"http://{host}", f"https://{host}"}

    def is_token(self, text: str) -> bool:
        """Whether a text is the token, or none is required. Takes the same time for any wrong text of one length."""
        return not self.token or hmac.compare_digest(text.encode("utf-8", "replace"), self.token.encode())


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
