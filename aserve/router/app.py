"""The application of the router: who may ask, what the router answers itself, and the rest, which
goes to the replicas.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Iterable

from aiohttp import StreamReader, hdrs, web
from aiohttp.typedefs import Handler

from aserve.config import Resolved
from aserve.errors import AserveError
from aserve.http.auth import Access, read_keys
from aserve.http.connection import close_after_unsized
from aserve.http.errors import RequestFailed, error_response, http_error_info, info_of, refused
from aserve.http.frontend_requests import Headers, end_to_end
from aserve.http.hosts import AllowedHosts, is_own_page
from aserve.http.intake import check_size, meet_expectation
from aserve.http.peers import ALONE, FORWARDED, PEERS
from aserve.http.sse import LAST_EVENT_ID
from aserve.router.admin import Admin
from aserve.router.balancer import Balancer
from aserve.router.failures import RouterEnds
from aserve.router.joined_answers import (
    ask_everyone,
    first_known,
    is_change,
    is_for_all,
    json_in,
    metrics_of_all,
)
from aserve.router.metrics import RouterMetrics
from aserve.router.owners import id_in_path
from aserve.router.policies import Demand
from aserve.router.prefixes import block_digests
from aserve.router.proxy import STARTED_S, Exchange, Proxy
from aserve.router.rate_limits import RateLimits, SocketLimits
from aserve.router.request_facts import NO_FACTS, TOKEN_BYTES, RequestFacts, facts_of
from aserve.router.upstream import (
    CANNOT_CONNECT,
    GONE,
    PROBE_S,
    Call,
    Upstream,
    check_address,
    name_of,
)

logger = logging.getLogger(__name__)

USAGE = re.compile(rb'"total_tokens"\s*:\s*(\d{1,15})(?!\d)')
CLIENT = web.RequestKey("client", str)
LIMITS = web.RequestKey("limits", dict[str, str])
FORWARDED_FOR = "X-Forwarded-For"
REPLACED = frozenset({"host", "content-length", FORWARDED_FOR.lower()})  # the replica gets its own


class Router:
    """`open` and `close` surround its use. `watch` runs between them and probes the replicas."""

    def __init__(self, resolved: Resolved, addresses: Iterable[str]) -> None:
        self.options = resolved.router
        self.server = resolved.server
        self.balancer = Balancer(self.options)
        self.metrics = RouterMetrics(self.balancer)
        timeout_s = self.server.write_timeout
        self.proxy = Proxy(self.options, self.balancer, self.metrics, write_timeout_s=timeout_s)
        self.is_draining = False
        self.admin = Admin(self.balancer, self.add)
        self._group: asyncio.TaskGroup | None = None  # of `watch`
        limits = {
            "requests": self.options.requests_per_minute,
            "tokens": self.options.tokens_per_minute,
        }
        self.rates = RateLimits({kind: limit for kind, limit in limits.items() if limit})
        self._keys = read_keys(self.server)
        self._hosts = AllowedHosts(self.server)
        self._addresses = [check_address(address) for address in addresses]

    @property
    def num_given(self) -> int:
        return len(self._addresses)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=self.server.max_body_size, middlewares=[self._border])
        app[PEERS] = ALONE
        app.on_response_prepare.extend((_add_server, close_after_unsized))
        routes = {
            "/health": self.health,
            "/readyz": self.health,
            "/livez": self.livez,
            "/startupz": self.health,
            "/metrics": self.read_metrics,
            "/server_info": self.server_info,
        }
        app.add_routes([web.get(path, handler) for path, handler in routes.items()])
        if self.server.admin_api_key:
            app.add_routes(self.admin.routes())
        app.add_routes([web.route("*", "/{path:.*}", self.pass_on)])
        return app

    def open(self) -> None:
        for address in self._addresses:
            self.add(address)

    def add(self, address: str) -> None:
        """Adds a replica. One that is known, such as one that drains, may get another login."""
        name = name_of(address)
        is_new = self.balancer.add(name)
        if (known := self.proxy.upstreams.get(name)) is not None:
            known.use_login(address)
        elif is_new:
            upstream = self.proxy.upstreams[name] = Upstream(address, self.options)
            upstream.open()
            if self._group is not None:
                self._group.create_task(self._watch(name))

    async def close(self) -> None:
        for upstream in self.proxy.upstreams.values():
            await upstream.close()

    async def watch(self) -> None:
        """Probes all replicas at intervals, and a new one at once."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            for name in self.proxy.upstreams:
                group.create_task(self._watch(name))
            await asyncio.Event().wait()

    async def _watch(self, name: str) -> None:
        told = ""
        while (replica := self.balancer.find(name)) is not None:
            before, cause = replica.state, ""
            try:
                load = await self.proxy.upstreams[name].probe()
                self.balancer.probed(name, load=load)
            # WHY: an address may also be one that no connection can be made to (ValueError).
            except (*GONE, ValueError) as error:
                self.balancer.failed(name, is_down=isinstance(error, CANNOT_CONNECT))
                cause = str(error) or f"it has not answered within {PROBE_S:g} seconds"
            if cause and cause != told:
                logger.warning("probe failed address=%s cause=%r", name, cause)
            told = cause
            if replica.state != before:
                logger.info("replica address=%s state=%s before=%s", name, replica.state, before)
            await asyncio.sleep(self.options.health_interval)
        self.proxy.owners.forget(name)
        await self.proxy.upstreams.pop(name).close()
        if self.admin.fleet is not None:
            self.admin.fleet.release(name)
        logger.info("replica left address=%s", name)

    async def pass_on(self, request: web.Request) -> web.StreamResponse:
        """Handles every request that is not the router's own."""
        if self.is_draining:
            raise RouterEnds
        body = await self._read(request)
        facts = facts_of(body) if body else NO_FACTS
        is_streamed = body is None and request.can_read_body
        call = self._call(request, request.content if is_streamed else body)
        named = [id_in_path(request.path), *facts.ids, *_resumed(request)]
        owner = self.proxy.owners.find(filter(None, named))
        if self.balancer.find(owner) is None:
            owner = ""
        if not owner and is_for_all(request.method, request.path):
            changes = is_change(request.method, request.path)
            asked = self._all() if changes else self._asked()
            return await ask_everyone(call, asked, request.path, needs_all=changes)
        demand = Demand(block_digests(facts.prompt), self._session(request, facts), owner)
        exchange = Exchange(request, call, demand, named=named[:1] if named[0] else [])
        if not owner and named[0]:
            return await self.proxy.search(exchange, [each.name for each in self._asked()])
        if hdrs.UPGRADE in request.headers and web.WebSocketResponse().can_prepare(request):
            if self.rates.limits:
                on_refusal = self.metrics.limited.inc
                exchange.limits = SocketLimits(self.rates, request[CLIENT], on_refusal)
            return await self.proxy.relay(exchange, max_size=self.server.max_body_size + 1)
        if not self.rates.limits or request.method != hdrs.METH_POST:
            return await self.proxy.forward(exchange)
        return await self._limited(exchange, facts)

    async def _limited(self, exchange: Exchange, facts: RequestFacts) -> web.StreamResponse:
        """Serves a request within the rate limits of its client. A request that fails costs no
        tokens; one whose client goes before the end stays charged by the estimate.
        """
        client, now_s = exchange.request[CLIENT], time.monotonic()
        try:
            charged = self.rates.admit(client, facts.num_tokens, now_s)
        except RequestFailed:
            self.metrics.limited.inc()
            exchange.request[LIMITS] = self.rates.headers(client, now_s)
            raise
        exchange.headers.update(self.rates.headers(client, now_s))
        exchange.keeps_tail = "tokens" in self.rates.limits
        try:
            response = await self.proxy.forward(exchange)
        except (AserveError, RequestFailed):
            self.rates.correct(client, charged=charged, used=0)
            raise
        used = _used_tokens(exchange, facts, charged) if response.status < 400 else 0
        self.rates.correct(client, charged=charged, used=used)
        return response

    async def _read(self, request: web.Request) -> bytes | None:
        """Returns the body, or None if there is none or it is streamed to the replica. One whose
        path has an id may have to be sent to all of them.
        """
        is_upload = request.content_type.startswith("multipart/")
        if not request.can_read_body or (is_upload and not id_in_path(request.path)):
            return None
        if request.content_length and request.content.is_eof():  # it came with the head
            return request.content.read_nowait()
        limit_s = self.server.body_timeout + (request.content_length or 0) / (64 << 10)
        try:
            async with asyncio.timeout(limit_s):
                return await request.read()
        except TimeoutError:
            raise refused(408, "The request's body did not arrive in time.") from None

    def _call(self, request: web.Request, data: bytes | StreamReader | None = None) -> Call:
        """NOTE: a target may be a whole URL (RFC 9112, 3.2.2)."""
        path = request.raw_path
        if not path.startswith("/"):
            path = request.rel_url.raw_path_qs
        return Call(request.method, path, self._headers(request), data)

    def _headers(self, request: web.Request) -> Headers:
        """Returns the headers for a replica. A process of this router believes the client's
        address.
        """
        headers = _headers(request)
        if self.admin.fleet is None:
            return headers
        return [*headers, (FORWARDED, self.admin.fleet.peers.header_for(request))]

    def _session(self, request: web.Request, facts: RequestFacts) -> str:
        name = self.options.session_header
        return request.headers.get(name) or request.cookies.get(name) or facts.session

    def _asked(self) -> list[Upstream]:
        """Returns the replicas that serve, or all that there are if none does."""
        replicas = self.balancer.replicas()
        serving = [each.name for each in replicas if each.is_healthy] or [
            each.name for each in replicas
        ]
        return [self.proxy.upstreams[name] for name in serving]

    def _all(self) -> list[Upstream]:
        """Returns the replicas but those that leave."""
        replicas = self.balancer.replicas()
        return [self.proxy.upstreams[each.name] for each in replicas if not each.is_removed]

    async def health(self, _: web.Request) -> web.Response:
        """Answers 200 while a replica can get requests."""
        num_healthy = sum(each.state == "healthy" for each in self.balancer.replicas())
        is_ready = bool(num_healthy) and not self.is_draining
        status = "draining" if self.is_draining else ("ready" if is_ready else "no_replica")
        body = {"status": status, "replicas": num_healthy}
        return web.json_response(body, status=200 if is_ready else 503)

    async def livez(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "alive"})

    async def read_metrics(self, request: web.Request) -> web.Response:
        return await metrics_of_all(self._call(request), self._asked(), self.metrics)

    async def server_info(self, request: web.Request) -> web.Response:
        """Answers as the first replica does, with the router's settings beside it."""
        _, whole = await first_known(self._call(request), self._asked())
        info = json_in(whole) if whole.status == 200 else None
        router = {"policy": self.options.policy, "replicas": self.admin.described()}
        return web.json_response((info if isinstance(info, dict) else {}) | {"router": router})

    @web.middleware
    async def _border(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Checks host and key, and turns errors into answers."""
        request[STARTED_S] = time.monotonic()
        try:
            self._hosts.check_host(request)
            request[CLIENT] = self._keys.identify(request, self._access(request)).client
            check_size(request, self.server.max_body_size)
            await meet_expectation(request)
            return await handler(request)
        except (AserveError, RequestFailed) as error:
            response = error_response(info_of(error))
        except web.HTTPException as error:
            where = f"{request.method} {request.path[:200]}"
            response = error_response(http_error_info(error, where=where))
        except web.RequestPayloadError:
            response = error_response(refused(400, "The request's body is broken.").info)
        except ConnectionError:
            return web.Response(status=499)
        response.headers.update(request.get(LIMITS, {}))
        return response

    def _access(self, request: web.Request) -> Access:
        """Without keys of its own the router lets the replicas check them."""
        is_probe = request.path in ("/health", "/readyz", "/livez", "/startupz")
        is_admin = request.path.startswith("/admin/") and bool(self.server.admin_api_key)
        is_open = request.path == "/metrics" and self.server.public_metrics
        return Access(is_public=is_probe or is_open, is_admin=is_admin)


async def _add_server(_: web.Request, response: web.StreamResponse) -> None:
    response.headers[hdrs.SERVER] = "aserve"


def _headers(request: web.Request) -> Headers:
    """Returns the headers for a replica, which sees the client's address in X-Forwarded-For. Pages
    of the router are the replica's own, which sees another Host than theirs.
    """
    given = end_to_end(request.headers)
    dropped = REPLACED | {"origin"} if is_own_page(request) else REPLACED
    headers = [each for each in given if each[0].lower() not in dropped]
    hops = [*request.headers.getall(FORWARDED_FOR, []), request.remote or "unix"]
    headers.append((FORWARDED_FOR, ", ".join(hops)))
    return headers


def _used_tokens(exchange: Exchange, facts: RequestFacts, charged: int) -> int:
    """Returns the usage in an answer. One without is estimated, at no more than was charged: an
    event of a stream is a token.
    """
    told = USAGE.findall(exchange.tail)
    if told:
        return int(told[-1])
    num_output = exchange.num_events or exchange.num_bytes // TOKEN_BYTES
    return min(charged, facts.num_prompt_tokens + num_output)


def _resumed(request: web.Request) -> list[str]:
    """Returns the id of the stream that a client resumes: it stands before the event's number."""
    last = request.headers.get(LAST_EVENT_ID, "")
    return [last, last.rpartition(":")[0]] if last else []
