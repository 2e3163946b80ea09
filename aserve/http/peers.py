"""The frontend processes of one server, as each of them knows the others.

They share the port, and each listens on a Unix socket of its own in a private directory. A request
that another frontend has forwarded has a header with the token of the server, which no client
knows, and the address of the client. The id of a request ends with the number of its frontend.
"""

from __future__ import annotations

import hmac
import os
import re
import uuid

import msgspec
from aiohttp import web

FORWARDED = "X-Aserve-Forwarded"
EXPIRES = "X-Aserve-Expires"  # with the time of the machine's clock after which nobody waits for it
RAW_BODY = web.RequestKey("raw_body", bytes)  # for a request that may have to be forwarded
PASSED_ON = web.RequestKey("passed_on", bool)  # other frontends handle it
ID = re.compile(r"[0-9a-f]{32}\.([0-9]{1,9})")
SOCKET = re.compile(r"([0-9]+)\.sock")


class Peers(msgspec.Struct, frozen=True):
    """`number` is that of this frontend; the first one has 0. A server with one frontend has no
    directory, and no token unless it is a replica, whose router sends its requests.
    """

    number: int = 0
    directory: str = ""
    token: str = ""

    @property
    def are_several(self) -> bool:
        return bool(self.directory)

    def new_id(self) -> str:
        """Makes the id of a request. The first frontend's ids are without a number."""
        return uuid.uuid4().hex + (f".{self.number}" if self.number else "")

    def socket_of(self, number: int) -> str:
        return f"{self.directory}/{number}.sock"

    def numbers(self) -> list[int]:
        """Returns the numbers of the frontends that listen, in order."""
        found = map(SOCKET.fullmatch, os.listdir(self.directory))
        return sorted(int(each[1]) for each in found if each)

    def header_for(self, request: web.Request) -> str:
        return f"{self.token} {request.remote or ''}"

    def is_forwarded(self, request: web.Request) -> bool:
        """Returns whether another frontend, or the router of this replica, has sent it."""
        token = request.headers.get(FORWARDED, "").partition(" ")[0]
        given = token.encode("utf-8", "surrogateescape")
        return bool(self.token) and hmac.compare_digest(given, self.token.encode())


ALONE = Peers()


def owner_of(request_id: str) -> int:
    """Returns the number of the frontend that made an id, which may be a part of `request_id`."""
    found = ID.search(request_id)
    return int(found[1]) if found else 0


def address_of(request: web.Request) -> str:
    """Returns the address of the client, also of a request that another frontend has forwarded."""
    if request.app[PEERS].is_forwarded(request):
        return request.headers[FORWARDED].partition(" ")[2]
    return request.remote or ""


PEERS = web.AppKey("peers", Peers)
