"""Checks API keys and identifies the caller.

The decision depends on the matched route, never on the URL's text. Every route needs a key unless
it is public, and so do unknown routes. A key comes as `Authorization: Bearer KEY` or, as
Anthropic's clients send it, as `X-Api-Key: KEY`. Only digests of keys are kept and compared.
"""

from __future__ import annotations

import functools
import hmac
import ipaddress
from dataclasses import dataclass
from hashlib import blake2b, sha256
from pathlib import Path

from aiohttp import hdrs, web

from aserve.config import ServerOptions
from aserve.errors import ConfigError, InvalidRequest, Unauthorized
from aserve.http.errors import refused
from aserve.http.openai.limits import Caller
from aserve.http.peers import address_of

API_KEY = "X-Api-Key"
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


@dataclass(frozen=True, slots=True)
class Access:
    """The callers that may use a route: everybody, the administrator alone, or all clients."""

    is_public: bool = False
    is_admin: bool = False


class ApiKeys:
    """The accepted API keys of clients and of the administrator. Without client keys the server
    serves everybody, except on admin routes.
    """

    def __init__(self, client_keys: frozenset[bytes], *, admin_key: bytes | None = None) -> None:
        self._clients = tuple(digest_of(key) for key in client_keys)
        self._admins = (digest_of(admin_key),) if admin_key else ()

    def identify(self, request: web.Request, access: Access) -> Identity:
        """Returns the caller's identity. Raises Unauthorized if the route needs a key and the
        request has none or a wrong one, and answers 403 to a client on an admin route.
        """
        if access.is_public:
            return ANONYMOUS
        given = _given_key(request)
        if given and is_one_of(self._admins, given):
            return Identity(_client_of(b"key", given), is_admin=True)
        is_client = is_one_of(self._clients, given)
        if (self._clients or access.is_admin) and not is_client:
            what = "is not correct" if given else "was not given"
            raise Unauthorized(f"The API key {what}: send it as `Authorization: Bearer KEY`.")
        if access.is_admin:
            raise refused(403, "This route needs the administrator's API key.")
        if is_client:
            return Identity(_client_of(b"key", given))
        return Identity(_client_of(b"peer", _network_of(address_of(request)).encode()))


def digest_of(key: bytes) -> bytes:
    return sha256(key).digest()


def is_one_of(digests: tuple[bytes, ...], given: bytes) -> bool:
    """Compares a key with all digests, in a time that does not reveal which one matched."""
    if not digests:
        return False
    digest = digest_of(given)
    matches = [hmac.compare_digest(digest, each) for each in digests]
    return any(matches)


def read_keys(options: ServerOptions) -> ApiKeys:
    """Reads the keys of the options and of the key file. Raises ConfigError if there is none."""
    keys = _keys_in(options.api_key.split(","), "--api-key") if options.api_key else frozenset()
    if options.api_key_file is not None:
        lines = _lines_of(options.api_key_file)
        keys |= _keys_in(lines, f"--api-key-file {options.api_key_file}")
    admin = options.admin_api_key
    return ApiKeys(keys, admin_key=admin.strip().encode() if admin else None)


def has_keys(options: ServerOptions) -> bool:
    """Returns whether clients need a key."""
    return options.api_key is not None or options.api_key_file is not None


def caller_of(request: web.Request, options: ServerOptions, *, max_sequences: int) -> Caller:
    """Builds the caller of a request from the identity that the border middleware found."""
    identity = request[IDENTITY]
    # WHY: a server without keys has one user, whose prompts may share cached KV.
    is_private = has_keys(options) and not options.shared_prefix_cache
    return Caller(
        client=identity.client,
        namespace=identity.client if is_private else "",
        owner=identity.client if has_keys(options) else "",
        may_set_priority=options.enable_priority_scheduling or identity.is_admin,
        max_sequences=max_sequences,
    )


def _given_key(request: web.Request) -> bytes:
    """Returns the key's bytes unchanged, or b"" without a key or for another scheme.

    NOTE: two different keys are refused, and so is a repeated header, because a proxy may have
    checked the other one.
    """
    scheme, _, token = _single(request, hdrs.AUTHORIZATION).partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    plain = _single(request, API_KEY).strip()
    if bearer and plain and bearer != plain:
        raise InvalidRequest(
            "The Authorization and X-Api-Key headers have different keys: send one of them.",
            code="duplicate_header",
        )
    return (bearer or plain).encode("utf-8", "surrogateescape")


def _single(request: web.Request, name: str) -> str:
    given = request.headers.getall(name, [])
    if len(given) > 1:
        raise InvalidRequest(
            f"The {name} header was sent {len(given)} times: send it once.",
            code="duplicate_header",
        )
    return given[0] if given else ""


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


@functools.lru_cache(maxsize=1 << 12)  # parsing takes longer than all else here
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
