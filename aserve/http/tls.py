"""The TLS side of the port: the certificate, and the authorities of clients' certificates.

Each handshake looks whether the files have changed, so a renewed certificate needs no restart.
Connections that are open keep the one that they began with.
"""

from __future__ import annotations

import logging
import os
import ssl

from aserve.config import ServerOptions
from aserve.errors import ConfigError

logger = logging.getLogger(__name__)


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
    try:
        context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
        if options.ssl_ca_certs is not None:
            context.load_verify_locations(options.ssl_ca_certs)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:  # also SSLError, which it is the base of
        named = ", ".join(_files(options))
        raise ConfigError(f"cannot use the TLS files {named}: {error.strerror}") from None
    return context


def _files(options: ServerOptions) -> list[str]:
    files = (options.ssl_certfile, options.ssl_keyfile, options.ssl_ca_certs)
    return [name for name in files if name is not None]


def _changed_s(options: ServerOptions) -> list[float]:
    """Returns when each file was changed, 0 for one that is not there at the moment."""
    return [os.stat(name).st_mtime if os.path.exists(name) else 0.0 for name in _files(options)]
