"""Checks API keys and identifies the caller.

The decision depends on the matched route, never on the URL's text. Every route needs a key unless
it is listed as public, and so do unknown routes.
"""

from __future__ import annotations

import hmac
import ipaddress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from aiohttp import hdrs, web

from aserve.config import ServerOptions
from aserve.errors import ConfigError, InvalidRequest, Unauthorized
from aserve.http.openai.limits import Caller

# The start page and the health probe say nothing about anybody's requests.
PUBLIC_ROUTES = frozenset({"/", "/health"})
METRICS = "/metrics"
CLIENT_BYTES = 12
IPV6_NETWORK_BITS = 64  # a provider gives one customer a /64, so a /64 is one client


@dataclass(frozen=True, slots=True)
class Identity:
    """The client behind a request. `client` is an opaque id: a hash of the API key, or of the
    peer's address if the server has no keys.
    """

    client: str
    is_admin: bool = False


ANONYMOUS = Identity("")
IDENTITY = web.RequestKey("identity", Identity)


class ApiKeys:
    """The accepted API keys of clients and of the administrator. Without client keys the server
    serves everybody.
    """

    def __init__(
        self,
        client_keys: frozenset[bytes],
        *,
        admin_key: bytes | None = None,
        has_public_metrics: bool = False,
    ) -> None:
        self._client_keys = tuple(sorted(client_keys))
        self._admin_key = admin_key
        self._public = PUBLIC_ROUTES | ({METRICS} if has_public_metrics else set())

    @property
    def are_required(self) -> bool:
        return bool(self._client_keys)

    def identify(self, request: web.Request) -> Identity:
        """Returns the caller's identity. Raises Unauthorized if the route needs a key and the
        request has none or a wrong one.
        """
        resource = request.match_info.route.resource
        if resource is not None and resource.canonical in self._public:
            return ANONYMOUS
        given = _given_key(request)
        if given and self._admin_key is not None and hmac.compare_digest(given, self._admin_key):
            return Identity(_client_of(b"key", given), is_admin=True)
        if not self.are_required:
            return Identity(_client_of(b"peer", _network_of(request.remote or "").encode()))
        if not given:
            raise Unauthorized("No API key was given: send it as `Authorization: Bearer KEY`.")
        # WHY: every key is compared, so that the time does not reveal which one matched.
        matches = [hmac.compare_digest(given, key) for key in self._client_keys]
        if not any(matches):
            raise Unauthorized("The API key is not correct.")
        return Identity(_client_of(b"key", given))


def read_keys(options: ServerOptions) -> ApiKeys:
    """Reads the keys of the options and of the key file. Raises ConfigError if there is none."""
    keys = _keys_in(options.api_key.split(","), "--api-key") if options.api_key else frozenset()
    if options.api_key_file is not None:
        lines = _lines_of(options.api_key_file)
        keys |= _keys_in(lines, f"--api-key-file {options.api_key_file}")
    admin = options.admin_api_key
    return ApiKeys(
        keys,
        admin_key=admin.strip().encode() if admin else None,
        has_public_metrics=options.public_metrics,
    )


def caller_of(request: web.Request, options: ServerOptions, max_sequences: int) -> Caller:
    """Builds the caller of a request from the identity that the border middleware found."""
    identity = request[IDENTITY]
    has_keys = options.api_key is not None or options.api_key_file is not None
    # WHY: a server without keys has one user, whose prompts may share cached KV.
    is_private = has_keys and not options.shared_prefix_cache
    return Caller(
        client=identity.client,
        namespace=identity.client if is_private else "",
        owner=identity.client if has_keys else "",
        may_set_priority=options.enable_priority_scheduling or identity.is_admin,
        max_sequences=max_sequences,
    )


def _given_key(request: web.Request) -> bytes:
    """Returns the bearer token's bytes unchanged, or b"" without a token or for another scheme.

    NOTE: a repeated header is refused, because a proxy may have checked the other one.
    """
    given = request.headers.getall(hdrs.AUTHORIZATION, [])
    if len(given) > 1:
        raise InvalidRequest(
            f"The Authorization header was sent {len(given)} times: send it once.",
            code="duplicate_header",
        )
    scheme, _, token = given[0].partition(" ") if given else ("", "", "")
    if scheme.lower() != "bearer":
        return b""
    return token.strip().encode("utf-8", "surrogateescape")


def _keys_in(texts: list[str], where: str) -> frozenset[bytes]:
    keys = frozenset(text.strip().encode() for text in texts if text.strip())
    if not keys:
        raise ConfigError(f"{where} contains no key: give at least one, or leave the option out")
    return keys


def _lines_of(path: str) -> list[str]:
    """Returns the lines of a key file without its comments, which begin with #."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read --api-key-file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--api-key-file {path} is not UTF-8 text") from None
    return [line for line in text.splitlines() if not line.lstrip().startswith("#")]


def _client_of(kind: bytes, name: bytes) -> str:
    return blake2b(name, digest_size=CLIENT_BYTES, person=kind).hexdigest()


def _network_of(address: str) -> str:
    """Returns an IPv4 address unchanged, and the /64 network of an IPv6 address."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if parsed.version == 4:
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((int(parsed), IPV6_NETWORK_BITS), strict=False))
