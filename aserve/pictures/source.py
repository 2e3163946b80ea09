"""The URLs by which clients give pictures: data URLs, and those of domains that the operator named.

These checks need neither the network nor a decoder, so that a wrong URL is refused at once.
"""

from __future__ import annotations

import ipaddress
import re

import msgspec
from yarl import URL

from aserve.errors import ConfigError, InvalidRequest
from aserve.picture import PictureSource

MAX_BYTES = 20 << 20  # of one picture's file
BASE64 = ";base64"
SCHEMES = ("http", "https")
HOST_NAME = re.compile(r"[\w-]+(\.[\w-]+)*")


class MediaDomains(msgspec.Struct, frozen=True):
    """The domains from which pictures are fetched. Without any, none is fetched."""

    names: tuple[str, ...] = ()

    @staticmethod
    def parse(given: str | None) -> MediaDomains:
        """Reads the value of --allow-media-domains."""
        names = [name.strip().lower() for name in (given or "").split(",")]
        return MediaDomains(tuple(_checked_domain(name) for name in names if name))

    def url(self, source: PictureSource) -> URL:
        """Returns the URL that is fetched. Raises InvalidRequest for one that is not."""
        if not self.names:
            raise invalid_picture(
                source,
                "give the picture as a data URL; this server fetches no others (its option "
                "--allow-media-domains names domains that it may fetch from)",
            )
        try:
            url = URL(source.url)
            host, _ = url.host, url.port
        except ValueError:
            raise invalid_picture(source, "its URL is not a URL") from None
        if url.scheme not in SCHEMES or not host:
            raise invalid_picture(source, "its URL must begin with data:, http:// or https://")
        if url.user is not None or url.password is not None:
            raise invalid_picture(source, "its URL has a user or a password")
        if host.lower() not in self.names:
            raise invalid_picture(
                source,
                f"its host '{host[:100]}' is not a domain that this server fetches from "
                f"({', '.join(self.names)}); give the picture as a data URL",
            )
        return url


NO_DOMAINS = MediaDomains()


def is_remote(source: PictureSource) -> bool:
    """Whether the picture must be fetched before it can be read."""
    return not source.data and source.url[:5].lower() != "data:"


def check_source(source: PictureSource, domains: MediaDomains) -> None:
    """Raises InvalidRequest for a URL that is neither a data URL nor one of these domains."""
    if is_remote(source):
        domains.url(source)
        return
    if source.data:
        return
    kind, comma, data = source.url.partition(",")
    if not comma or not kind.lower().endswith(BASE64):
        raise invalid_picture(source, "a data URL must be 'data:image/...;base64,...'")
    if len(data) * 3 // 4 > MAX_BYTES:
        raise too_large(source)


def too_large(source: PictureSource) -> InvalidRequest:
    return invalid_picture(source, f"its file has more than {MAX_BYTES} bytes")


def invalid_picture(source: PictureSource, why: str) -> InvalidRequest:
    return InvalidRequest(
        f"Invalid '{source.param}': the picture cannot be read: {why}.",
        param=source.param,
        code="invalid_image",
    )


def _checked_domain(name: str) -> str:
    """Returns the name as the host of a URL has it. An address is no name: it would be connected
    to without asking the resolver."""
    try:
        host = URL.build(scheme="http", host=name).host
    except ValueError:
        host = None
    if host is None or not HOST_NAME.fullmatch(name) or _is_address(name):
        raise ConfigError(
            f"--allow-media-domains names {name!r}; expected names of hosts such as "
            "images.example.com, without scheme, port or path"
        )
    return host


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
