"""The administrator's routes of the router.

They list, add, drain and remove replicas, and change the number of those that are processes of the
router.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec
from aiohttp import web

from aserve.errors import ConfigError, InvalidRequest, NotFound
from aserve.http.body import parse_body
from aserve.router.balancer import Balancer, Replica
from aserve.router.fleet import Fleet, Registry
from aserve.router.upstream import check_address, name_of

PATH = "/admin/replicas"


class ReplicaBody(msgspec.Struct):
    url: str


class CountBody(msgspec.Struct):
    count: Annotated[int, msgspec.Meta(ge=1, le=256)]


class Admin:
    """`add` makes a replica known to the router. `fleet` has the replicas that are processes of the
    router, if it starts any.
    """

    def __init__(self, balancer: Balancer, add: Callable[[str], None]) -> None:
        self.fleet: Fleet | None = None
        self._balancer = balancer
        self._add = add

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get(PATH, self.list_replicas),
            web.post(PATH, self.add_replica),
            web.put(PATH, self.scale),
            web.delete(PATH, self.remove_replica),
            web.post(f"{PATH}/drain", self.drain_replica),
        ]

    def registry(self) -> Registry:
        """Returns what a fleet tells the router by."""
        balancer = self._balancer
        return Registry(
            joined=self._add,
            ready=lambda address: balancer.probed(address, load=None),
            died=lambda address: balancer.failed(address, is_down=True),
            left=self._remove,
        )

    def described(self) -> list[dict[str, object]]:
        return [
            {"url": each.name, "state": each.state, "load": each.load, "in_flight": each.in_flight}
            for each in self._balancer.replicas()
        ]

    async def list_replicas(self, _: web.Request) -> web.Response:
        return self._answer()

    async def add_replica(self, request: web.Request) -> web.Response:
        self._add(await _address_in(request))
        return self._answer()

    async def scale(self, request: web.Request) -> web.Response:
        """Changes the number of the replicas that are processes of this router."""
        if self.fleet is None:
            raise InvalidRequest("The router was not started by `aserve serve --replicas N`.")
        try:
            leaving = self.fleet.scale(parse_body(await request.read(), CountBody).count)
        except ConfigError as error:
            raise InvalidRequest(str(error)) from None
        for address in leaving:
            self._remove(address)
        return self._answer()

    async def drain_replica(self, request: web.Request) -> web.Response:
        self._balancer.drain((await self._named(request)).name)
        return self._answer()

    async def remove_replica(self, request: web.Request) -> web.Response:
        """The replica leaves when its open requests have ended."""
        self._balancer.remove((await self._named(request)).name)
        return self._answer()

    def _answer(self) -> web.Response:
        return web.json_response({"data": self.described()})

    def _remove(self, address: str) -> None:
        if self._balancer.find(address) is not None:
            self._balancer.remove(address)

    async def _named(self, request: web.Request) -> Replica:
        name = name_of(await _address_in(request))
        replica = self._balancer.find(name)
        if replica is None:
            raise NotFound(f"There is no replica {name}.")
        return replica


async def _address_in(request: web.Request) -> str:
    try:
        return check_address(parse_body(await request.read(), ReplicaBody).url)
    except ConfigError as error:
        raise InvalidRequest(str(error), param="url") from None
