"""Checks the Host of requests and the Origin of websockets.

A browser sends the name from the URL as `Host`, and the origin of the page as `Origin`. Without
these checks any web page could reach a server on its visitor's machine: the page's name can resolve
to 127.0.0.1 (DNS rebinding), and browsers open websockets to any server.
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
    """The accepted host names, or None for any, and the accepted origins.

    By default a server on a loopback address accepts only local names. A server on another address
    cannot know its names, and accepts any.
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
        """Raises if the Host is not allowed. A request without one is accepted: it does not come
        from a browser.
        """
        host = request.headers.get(hdrs.HOST)
        if host is None or self.names is None:
            return
        name = name_of(host)
        is_local = name is not None and name.endswith(".localhost")
        if name not in self.names and not is_local:
            raise refused(
                403,
                "The name in the request's Host header is not allowed. "
                "Start the server with --allowed-hosts and that name.",
            )

    @property
    def has_origins(self) -> bool:
        return bool(self._origins)

    def allows_origin(self, origin: str) -> bool:
        """Returns whether --allowed-origins allows it."""
        return ANY in self._origins or origin.lower() in self._origins

    def check_origin(self, request: web.Request) -> None:
        """Raises unless the Origin is allowed or is the server itself."""
        origin = request.headers.get(hdrs.ORIGIN)
        if origin is None or self.allows_origin(origin) or is_own_page(request):
            return
        raise refused(
            403,
            "Pages with this Origin are not allowed to connect. "
            "Start the server with --allowed-origins and the page's origin.",
        )


def is_own_page(request: web.Request) -> bool:
    """Returns whether the request comes from a page of the server that it goes to."""
    try:
        page = urlsplit(request.headers.get(hdrs.ORIGIN, "")).netloc.lower()
    except ValueError:
        page = ""
    return page != "" and page == request.host.lower()


def split_list(text: str | None) -> frozenset[str]:
    """Splits names separated by commas, and lowers their case."""
    return frozenset(filter(None, (name.strip().lower() for name in (text or "").split(","))))


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def name_of(host: str) -> str | None:
    """Returns the host without its port, or None if it is malformed."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


HOSTS = web.AppKey("hosts", AllowedHosts)
