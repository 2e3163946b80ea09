"""Checks the Host of requests and the Origin of websockets.

A browser sends the name in the address as `Host`, and the page's own address as `Origin`. Without
these checks any page could reach a server on its reader's own machine: its name can resolve to
127.0.0.1 (DNS rebinding), and a browser opens websockets to any server without asking it.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from aiohttp import hdrs, web

from aserve.config import ServerOptions
from aserve.http.errors import refused

ANY = "*"
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


class AllowedHosts:
    """`names` is None where any name is right.

    By default a server that listens on a loopback address answers to local names alone. One that
    listens on other addresses is meant to be reached, under names that it cannot know.
    """

    def __init__(self, options: ServerOptions) -> None:
        given = split_list(options.allowed_hosts)
        listens = options.host.lower().strip("[]")
        self.names: frozenset[str] | None = None
        if given:
            self.names = None if ANY in given else given | LOCAL_NAMES
        elif is_loopback(listens):
            self.names = LOCAL_NAMES | {listens}
        self._origins = split_list(options.allowed_origins)

    def check_host(self, request: web.Request) -> None:
        """WHY: a request without `Host` does not come from a browser."""
        host = request.headers.get(hdrs.HOST)
        if host is None or self.names is None:
            return
        name = name_of(host)
        is_local = name is not None and name.endswith(".localhost")
        if name not in self.names and not is_local:
            raise refused(
                403,
                "This server does not answer to the name in the request's Host header. "
                "Start it with --allowed-hosts and that name.",
            )

    def check_origin(self, request: web.Request) -> None:
        """A page may connect to the server that it came from; others must be allowed."""
        origin = request.headers.get(hdrs.ORIGIN)
        if origin is None or ANY in self._origins or origin.lower() in self._origins:
            return
        try:
            page = urlsplit(origin).netloc.lower()
        except ValueError:
            page = ""
        if not page or page != request.host.lower():
            raise refused(
                403,
                "A page with this Origin may not connect to this server. "
                "Start it with --allowed-origins and the page's origin.",
            )


def split_list(text: str | None) -> frozenset[str]:
    """Names separated by commas."""
    return frozenset(filter(None, (name.strip().lower() for name in (text or "").split(","))))


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def name_of(host: str) -> str | None:
    """Without the port; None where it is no host at all."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


HOSTS = web.AppKey("hosts", AllowedHosts)
