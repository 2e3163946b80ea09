"""The TLS side of the port: the certificate, and the authorities of clients' certificates.

Each handshake looks whether the files have changed, so a renewed certificate needs no restart.
Connections that are open keep the one that they began with.
"""

from __future__ import annotations

import logging
import os
import ssl
from pathlib import Path
from typing import NoReturn, TypedDict

from aserve.config import ServerOptions
from aserve.errors import ConfigError

CERTIFICATE = b"CERTIFICATE-----"
KEY = b"PRIVATE KEY-----"
MISMATCH = "KEY_VALUES_MISMATCH"

logger = logging.getLogger(__name__)


class TlsArguments(TypedDict, total=False):
    """The arguments of a loop that make a server speak TLS; none without a certificate."""

    ssl: ssl.SSLContext
    ssl_handshake_timeout: float


def tls_arguments(options: ServerOptions) -> TlsArguments:
    """A handshake has the time of a request's head. WHY: a connection counts for the limits of
    connections and of time when its handshake has ended.
    """
    context = tls_context(options)
    if context is None:
        return {}
    return {"ssl": context, "ssl_handshake_timeout": options.header_timeout}


def tls_context(options: ServerOptions) -> ssl.SSLContext | None:
    """Returns None without a certificate. Raises ConfigError for files that do not work."""
    if options.ssl_certfile is None:
        if options.ssl_keyfile is not None or options.ssl_ca_certs is not None:
            raise ConfigError("--ssl-keyfile and --ssl-ca-certs need --ssl-certfile")
        return None
    context = _load(options)
    context.sni_callback = _Renewal(options, context)
    return context


class _Renewal:
    """Called for each handshake, whether or not the client names a server."""

    def __init__(self, options: ServerOptions, context: ssl.SSLContext) -> None:
        self._options = options
        self._context = context
        self._changed_s = _changed_s(options)

    def __call__(
        self, connection: ssl.SSLObject | ssl.SSLSocket, _name: str | None, _: ssl.SSLContext
    ) -> None:
        changed_s = _changed_s(self._options)
        if changed_s != self._changed_s:
            self._changed_s = changed_s
            self._renew()
        connection.context = self._context

    def _renew(self) -> None:
        """Keeps the old files if the new ones do not work, which may be half written."""
        try:
            self._context = _load(self._options)
        except ConfigError as error:
            logger.error("certificate not renewed cause=%r", error.message)
        else:
            logger.info("certificate renewed path=%s", self._options.ssl_certfile)


def _load(options: ServerOptions) -> ssl.SSLContext:
    assert options.ssl_certfile is not None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    key = options.ssl_keyfile or options.ssl_certfile

    def refuse_password() -> NoReturn:
        """WHY: OpenSSL would ask the terminal, also in the midst of serving, for a renewed key."""
        raise ConfigError(
            f"the private key in {key} is encrypted; decrypt it: openssl pkey -in {key} -out NEW"
        )

    try:
        context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile, refuse_password)
        if options.ssl_ca_certs is not None:
            context.load_verify_locations(options.ssl_ca_certs)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:  # also SSLError, which it is the base of
        raise ConfigError(f"cannot use the TLS files: {_cause(options, error)}") from None
    return context


def _cause(options: ServerOptions, error: OSError) -> str:
    """Finds the file that is at fault. OpenSSL names none, and says "PEM lib" for most causes."""
    expected = (
        (options.ssl_certfile, CERTIFICATE, "certificate"),
        (options.ssl_keyfile or options.ssl_certfile, KEY, "private key (--ssl-keyfile)"),
        (options.ssl_ca_certs, CERTIFICATE, "certificate"),
    )
    for name, mark, what in expected:
        if name is None or (os.path.exists(name) and not os.path.isfile(name)):
            continue  # a pipe can be read once
        try:
            data = Path(name).read_bytes()
        except OSError as failure:
            return f"{name} cannot be read: {failure.strerror}"
        if mark not in data:
            return (
                f"{name} has no {what} in PEM form, which has a line that ends in {mark.decode()}"
            )
    if isinstance(error, ssl.SSLError) and error.reason == MISMATCH:
        key, certificate = options.ssl_keyfile or "the private key", options.ssl_certfile
        return f"{key} is not the private key of the certificate in {certificate}"
    return f"{', '.join(_files(options))}: {error.strerror}"


def _files(options: ServerOptions) -> list[str]:
    files = (options.ssl_certfile, options.ssl_keyfile, options.ssl_ca_certs)
    return [name for name in files if name is not None]


def _changed_s(options: ServerOptions) -> list[float]:
    """Returns when each file was changed, 0 for one that is not there at the moment."""
    return [_changed_at_s(name) for name in _files(options)]


def _changed_at_s(name: str) -> float:
    try:
        return os.stat(name).st_mtime
    except OSError:
        return 0.0
