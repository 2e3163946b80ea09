"""The server's state that handlers share, and the origin of each request: its id and its caller.

Only the border middleware writes the id and the time.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry

from aserve.config import ServerOptions
from aserve.errors import AserveError, EngineDead, ErrorInfo, ShuttingDown
from aserve.http.auth import caller_of
from aserve.http.calls import BEGINNING, RunningCalls, begin_with
from aserve.http.errors import RequestFailed
from aserve.http.live_settings import LiveSettings
from aserve.http.lora.registry import LoraRegistry
from aserve.http.openai.answer_size import AnswerLimits
from aserve.http.openai.call import Origin, Requests, random_seed
from aserve.http.openai.checks import check_model
from aserve.http.openai.limits import MAX_SEQUENCES, Caller
from aserve.http.peers import ALONE, Peers
from aserve.http.time_limits import NO_LIMITS, TimeLimits, limits_in_headers
from aserve.http.tokenize_service import TokenizeService
from aserve.messages.base import ServerPhase
from aserve.messages.changes import LoadWeights
from aserve.messages.executor import EngineSpec, Task
from aserve.messages.requests import GenerateRequest
from aserve.observability.engine_watch import EngineWatch
from aserve.observability.latency import Latency
from aserve.observability.recent import Recent
from aserve.parsers.registry import NO_PARSERS, ParserNames
from aserve.receipts.facts import FactFinder
from aserve.request_stream import Gateway
from aserve.text.defaults import NEUTRAL, GenerationDefaults
from aserve.text.pooling import PLAIN, PoolingTexts

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 5.0
EPOCH_BYTES = 8
REQUEST_ID = web.RequestKey("request_id", str)
STARTED_AT = web.RequestKey("started_at", float)


def origin_of(
    request: web.Request, context: HttpContext, *, started_s: float | None = None
) -> Origin:
    """`started_s` is the time when the call began, if that is not when the HTTP request did."""
    limits = limits_in_headers(
        request.headers,
        started_s=request[STARTED_AT] if started_s is None else started_s,
        is_traced=context.latency.is_traced,
    )
    origin = origin_for(caller_for(request, context), request[REQUEST_ID], context, limits)
    beginning = request.get(BEGINNING)
    return origin if beginning is None else begin_with(beginning, origin)


def caller_for(request: web.Request, context: HttpContext) -> Caller:
    return caller_of(request, context.options, max_sequences=context.state.max_sequences)


def origin_for(
    caller: Caller, request_id: str, context: HttpContext, limits: TimeLimits = NO_LIMITS
) -> Origin:
    def completed(model: str | None, requests: Requests) -> Requests:
        """NOTE: weights and adapters may change until the gateway has the requests, so nothing is
        awaited between the two. An adapter may have gone since the body was checked.
        """
        if model is not None:
            check_model(model, context.served_names)
        of_epoch = tuple(map(context.state.of_epoch, requests))
        return tuple(map(limits.apply, context.loras.apply(model, of_epoch)))

    return Origin(
        request_id=request_id,
        created=int(time.time()),
        model_names=context.served_names,
        draw_seed=context.draw_seed,
        defaults=context.state.defaults,
        parsers=context.state.parsers,
        answer_limits=AnswerLimits(
            context.options.max_answer_logprobs,
            context.state.max_model_len,
            context.state.defaults.max_new_tokens,
        ),
        completed=completed,
        caller=caller,
        always_reports_usage=context.options.enable_force_include_usage,
    )


@dataclass(slots=True)
class ServerState:
    """The server's phase, the reason why it is not ready, and facts about the loaded model."""

    phase: ServerPhase = "starting"
    reason: str = "loading the model"
    max_model_len: int | None = None
    is_paused: bool = False  # by the administrator
    is_updating: bool = False  # the weights: nothing runs meanwhile
    is_asleep: bool = False
    weight_version: str = "default"  # that the administrator gave to the weights
    weights: LoadWeights | None = None  # the last update of the weights, if there was one
    changes: set[asyncio.Task[None]] = field(default_factory=set)  # that are carried out
    sleep_turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # of a sleep or wake-up
    num_jobs: int = 0  # of the executor, at the administrator's request
    cache_epoch: str = ""  # changes when the prefix cache is flushed
    share: Callable[[], None] = lambda: None  # tells other frontends what the administrator changed
    max_sequences: int = MAX_SEQUENCES  # of one request: prompts times n
    defaults: GenerationDefaults = NEUTRAL
    parsers: ParserNames = NO_PARSERS
    pooling: PoolingTexts = PLAIN
    engine_age_s: Callable[[], float] = lambda: 0.0  # the time since the engine's last message
    settings: LiveSettings = field(default_factory=LiveSettings)
    watch: EngineWatch = field(default_factory=EngineWatch)

    @property
    def spec(self) -> EngineSpec | None:
        """Returns the sizes of the engine, once it has started."""
        return self.settings.spec

    @property
    def task(self) -> Task:
        """Returns what the model is for: a model that generates also embeds."""
        return "generate" if self.spec is None else self.spec.task

    @property
    def is_held(self) -> bool:
        """Whether new requests are refused until the administrator, or an update, is done."""
        return self.is_paused or self.is_updating

    def next_job(self) -> int:
        """Returns a number that no other job has."""
        self.num_jobs += 1
        return self.num_jobs

    def of_epoch(self, request: GenerateRequest) -> GenerateRequest:
        """Returns a request that finds no page from before the last flush."""
        if not self.cache_epoch:
            return request
        return msgspec.structs.replace(request, namespace=self.cache_epoch + request.namespace)

    def flush_cache(self) -> None:
        """Changes the namespace of later requests, so that they find no earlier page."""
        self.cache_epoch = secrets.token_hex(EPOCH_BYTES)
        self.share()

    def check_not_updating(self) -> None:
        """Raises for a change that must wait until an update of the weights has ended."""
        if self.is_updating:
            reason = "An update of the weights is running: try again when it has ended."
            kind, code = "invalid_request_error", "update_running"
            raise RequestFailed(ErrorInfo(reason, kind, code, 409, retry_after_s=RETRY_AFTER_S))

    async def carry_out(self, change: Coroutine[None, None, None]) -> None:
        """Runs a change, and raises what it raises. It goes on when the client that asked for it
        goes away, because it must not end half done. Then its failure is logged.
        """
        task = asyncio.ensure_future(change)
        self.changes.add(task)
        task.add_done_callback(self.changes.discard)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_log_failure)
            raise

    def refusal(self) -> AserveError | None:
        """Returns the error for new requests, or None if the server accepts them."""
        match self.phase:
            case "ready" if self.is_held:
                return ShuttingDown(
                    "the server is paused by its administrator",
                    code="server_paused",
                    retry_after_s=RETRY_AFTER_S,
                )
            case "ready" if self.is_asleep:
                return ShuttingDown(
                    "the server sleeps until its administrator wakes it",
                    code="server_sleeping",
                    retry_after_s=RETRY_AFTER_S,
                )
            case "ready":
                return None
            case "starting":
                return EngineDead(
                    f"the server is starting: {self.reason}",
                    code="server_starting",
                    retry_after_s=RETRY_AFTER_S,
                )
            case "draining":
                return ShuttingDown(
                    "the server is shutting down and takes no new requests",
                    retry_after_s=RETRY_AFTER_S,
                )
            case "dead":
                return EngineDead("the engine has failed and takes no requests; /health says why")


def _log_failure(change: asyncio.Task[None]) -> None:
    """Logs the traceback of a bug alone."""
    error = None if change.cancelled() else change.exception()
    if error is not None:
        bug = None if isinstance(error, AserveError | RequestFailed) else error
        logger.error("change failed, its client has gone error=%s", error, exc_info=bug)


@dataclass(frozen=True, slots=True)
class HttpContext:
    """The objects and options that all handlers share. `model_names` are the names of the base
    model, of which the first is the default.
    """

    gateway: Gateway
    state: ServerState
    options: ServerOptions
    model_names: tuple[str, ...]
    created: int  # seconds since 1970
    registry: CollectorRegistry
    tokenize_service: TokenizeService
    recent: Recent = field(default_factory=Recent)
    latency: Latency = field(default_factory=Latency)
    loras: LoraRegistry = field(default_factory=LoraRegistry)
    calls: RunningCalls = field(default_factory=RunningCalls)
    settings: Mapping[str, object] = field(default_factory=dict)  # the options without secrets
    draw_seed: Callable[[], int] = random_seed
    receipts: FactFinder | None = None
    peers: Peers = ALONE
    keep_alive_s: float = 15.0
    heartbeat_s: float = 60.0  # a silent websocket gets a ping, and half of this time to answer

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names that a client may give as `model`."""
        return (*self.model_names, *self.loras.names)
