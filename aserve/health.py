"""`aserve health`: asks the server of this machine whether it accepts requests.

Container engines run it as their health check, so an image needs no HTTP client. It finds the
server by the options that the server itself reads from the environment and from --config.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl

from aserve.config import ServerOptions

TIMEOUT_S = 5.0
LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # where to ask a server that listens everywhere


def ask_health(options: ServerOptions) -> tuple[bool, str]:
    """Returns whether the server is ready, and its status or why there is no answer."""
    connection = _connection(options)
    try:
        connection.request("GET", "/readyz")
        answer = connection.getresponse()
        status = json.loads(answer.read())["status"]
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException) as error:
        return False, f"the server does not answer: {error}"
    finally:
        connection.close()
    return answer.status == 200, str(status)


def _connection(options: ServerOptions) -> http.client.HTTPConnection:
    if options.uds:
        return UnixConnection(options.uds)
    host = LOOPBACK.get(options.host, options.host)
    if options.ssl_certfile is None:
        return http.client.HTTPConnection(host, options.port, timeout=TIMEOUT_S)
    # The certificate is for the name that clients use, and the server is on this machine.
    context = ssl._create_unverified_context()
    return http.client.HTTPSConnection(host, options.port, timeout=TIMEOUT_S, context=context)


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(TIMEOUT_S)
        self.sock.connect(self._path)
