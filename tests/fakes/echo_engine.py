"""A whole engine without a model: it answers each prompt with the prompt itself, then eos.

The text actors, the gateway and the HTTP server are the real ones; only scheduler and device are
played. It goes one step per turn of the loop, or stands still while `is_paused`.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Callable
from typing import Any

import aiohttp
import numpy as np
import openai
from prometheus_client import CollectorRegistry

from aserve.actors.base import Actor
from aserve.actors.detokenizer import DetokenizerActor
from aserve.actors.tokenizer import TokenizerActor
from aserve.amendments import amended_admit
from aserve.channel import Channel
from aserve.config import LoraOptions, ServerOptions
from aserve.errors import ErrorInfo, InvalidRequest
from aserve.http.lora.registry import LoraRegistry
from aserve.http.peers import ALONE, Peers
from aserve.http.server import HttpServer
from aserve.http.state import HttpContext, ServerState
from aserve.http.tokenize_service import TokenizeService
from aserve.messages.base import FinishReason, array_i32, pack_i32
from aserve.messages.changes import Amend, Amended, SequenceState
from aserve.messages.output import (
    DetokenizerEvent,
    OutputChunk,
    Refused,
    Retired,
    SequenceOutput,
    StepOutput,
)
from aserve.messages.requests import AdmitRequest, Cancel, EngineEvent, TokenizerEvent
from aserve.messages.results import PromptLogprobs, RowLogprobs
from aserve.parsers.registry import NO_PARSERS, ParserNames
from aserve.receipts.facts import FactFinder
from aserve.request_stream import Gateway
from aserve.text.lengths import PromptLimits
from aserve.text.prompt import PromptEncoder
from aserve.text.template import ChatTemplate
from aserve.text.tokenizer import TextTokenizer
from tests.fakes.packed_channel import PackedChannel
from tests.text.vocabularies import byte_level_tokenizer

MAX_MODEL_LEN = 512
TEMPLATE = "{% for message in messages %}{{ message.role[0] }}:{{ message.content }};{% endfor %}"


class Sequence:
    def __init__(
        self, request: AdmitRequest, child: int, *, logprob: float, runs: tuple[int, ...]
    ) -> None:
        ids = array_i32(request.prompt_ids).tolist()
        self.request = request
        self.child = child
        self.tokens = ids[child:] + ids[:child] + list(request.end_ids[:1])
        self.num_done = len(request.outputs[child]) // 4 if request.outputs else 0
        self.logprob = logprob  # of each token
        self.runs = itertools.chain(runs, itertools.repeat(1))  # tokens of each step
        # Its scores come in two runs before anything else, while its siblings go on.
        half, end = 1 + len(ids) // 2, len(ids)
        is_scored = request.sampling.prompt_logprobs is not None and child == 0
        scored = (range(1, half), range(half, end)) if is_scored else ()
        self.unscored = [run for run in scored if run]

    @property
    def key(self) -> tuple[str, int]:
        return self.request.request_id, self.child

    def ends(self) -> FinishReason | None:
        if self.unscored:
            return None
        limit = self.request.sampling.max_tokens or 0
        if self.num_done and self.tokens[self.num_done - 1] in self.request.end_ids:
            return "stop"
        return "length" if self.num_done >= min(limit, len(self.tokens)) else None

    def output(self) -> SequenceOutput:
        if self.unscored:
            return self._scored(self.unscored.pop(0))
        position = self.num_done
        self.num_done += next(self.runs)
        token_ids = self.tokens[position : self.num_done]
        return SequenceOutput(
            request_id=self.request.request_id,
            child=self.child,
            position=position,
            token_ids=pack_i32(token_ids),
            cached_len=3,
            logprobs=tuple(run for token_id in token_ids for run in self._logprobs(token_id)),
            num_drafts=len(token_ids) + 1 if self.request.prediction_ids else 0,
        )

    def embedded(self) -> SequenceOutput:
        """(3, 4, 12) of length 1, negative for a prompt that begins with token 1."""
        sign = -1 if array_i32(self.request.prompt_ids)[0] == 1 else 1
        vector = sign * np.array([3, 4, 12], np.float32) / 13
        return SequenceOutput(*self.key, 0, b"", cached_len=0, embedding=vector.tobytes())

    def _scored(self, positions: range) -> SequenceOutput:
        """The score of token i is -i."""
        values = -np.array(positions, np.float32)
        num_top = self.request.sampling.prompt_logprobs or 0
        run = PromptLogprobs(
            row=1,
            position=positions.start,
            chosen=values.tobytes(),
            ranks=pack_i32(list(positions)),
            top_ids=pack_i32([rank for _ in positions for rank in range(num_top)]),
            top_logprobs=np.repeat(values, num_top).tobytes(),
        )
        return SequenceOutput(*self.key, 0, b"", cached_len=3, prompt_logprobs=run)

    def _logprobs(self, token_id: int) -> tuple[RowLogprobs, ...]:
        num_top = self.request.sampling.logprobs
        if num_top is None:
            return ()
        top_ids = [(token_id + i) % 256 for i in range(num_top)]
        top_logprobs = np.array([-0.5 * (i + 1) for i in range(num_top)], np.float32)
        chosen = np.array([self.logprob], np.float32)
        return (RowLogprobs(1, chosen.tobytes(), pack_i32(top_ids), top_logprobs.tobytes()),)


class EchoScheduler(Actor[EngineEvent]):
    def __init__(self) -> None:
        super().__init__("scheduler", inbox=PackedChannel(EngineEvent))
        self.detokenizer: Channel[DetokenizerEvent] = Channel()  # set when it is connected
        self.live: dict[tuple[str, int], Sequence] = {}
        self.admitted: list[AdmitRequest] = []
        self.cancels: list[Cancel] = []
        self.runs: tuple[int, ...] = ()
        self.logprob_of: Callable[[int], float] = lambda child: -0.5
        self.is_paused = False
        self.refusal: ErrorInfo | None = None
        self.is_stepping = False
        self.changed = asyncio.Event()

    def handle(self, events: list[EngineEvent]) -> None:
        for event in events:
            if isinstance(event, AdmitRequest):
                self._admit(event)
            elif isinstance(event, Cancel):
                self._cancel(event)
            elif isinstance(event, Amend):
                self._amend(event)
        self.changed.set()
        self.resume()

    def resume(self) -> None:
        if self.live and not self.is_paused and not self.is_stepping:
            self.is_stepping = True
            asyncio.get_running_loop().call_soon(self._turn)

    def fail(self, error: ErrorInfo) -> None:
        for key in list(self.live):
            self._retire(key, "error", error)

    def _admit(self, request: AdmitRequest) -> None:
        self.admitted.append(request)
        if self.refusal is not None:
            self.detokenizer.send(Refused(request.request_id, self.refusal))
            return
        for child in range(request.sampling.n):
            sequence = Sequence(request, child, logprob=self.logprob_of(child), runs=self.runs)
            self.live[sequence.key] = sequence

    def _cancel(self, cancel: Cancel) -> None:
        self.cancels.append(cancel)
        for key in list(self.live):
            if key[0] == cancel.request_id and cancel.child in (None, key[1]):
                self._retire(key, cancel.reason)

    def _amend(self, event: Amend) -> None:
        """Reasoning cannot be ended here, and only 2,000 tokens are allowed."""
        found = [each for key, each in self.live.items() if key[0] == event.request_id]
        if event.ends_reasoning or (event.max_tokens or 0) > 2000:
            error = InvalidRequest("no", param="max_tokens", code="refused_here").info()
            self.detokenizer.send(Amended(event, error=error))
            return
        states: list[SequenceState] = []
        for each in found:
            each.request = request = amended_admit(each.request, event)
            sizes = (len(request.prompt_ids) // 4, each.num_done, request.sampling.max_tokens or 0)
            states.append(SequenceState(each.child, "running", *sizes, request.priority))
        self.detokenizer.send(Amended(event, tuple(states)))

    def _retire(
        self, key: tuple[str, int], reason: FinishReason, error: ErrorInfo | None = None
    ) -> None:
        done = self.live.pop(key)
        stop_id = done.tokens[done.num_done - 1] if reason == "stop" and done.num_done else None
        self.detokenizer.send(Retired(*key, reason, done.num_done, stop_id, error))

    def step(self) -> None:
        """One step, also while paused."""
        running = [sequence for sequence in self.live.values() if sequence.ends() is None]
        if running:
            self.detokenizer.send(StepOutput(1, tuple(each.output() for each in running)))
        for sequence in [each for each in self.live.values() if each.request.embeds]:
            self.detokenizer.send(StepOutput(1, (sequence.embedded(),)))
        for key, sequence in list(self.live.items()):
            reason = sequence.ends()
            if reason is not None:
                self._retire(key, reason)

    def _turn(self) -> None:
        self.is_stepping = False
        if not self.is_paused:
            self.step()
            self.resume()


class EchoEngine:
    """Starts a server on a free port; `url` is where it answers, `web` and `client` ask it."""

    def __init__(
        self,
        *,
        tokenizer: TextTokenizer | None = None,
        template: str | None = TEMPLATE,
        parsers: ParserNames = NO_PARSERS,
        receipts: FactFinder | None = None,
        keep_alive_s: float = 15.0,
        heartbeat_s: float = 60.0,
        peers: Peers = ALONE,
        **options: Any,
    ) -> None:
        self.tokenizer = tokenizer or byte_level_tokenizer()
        self.died: list[BaseException] = []
        self.scheduler = EchoScheduler()
        self.detokenizer = DetokenizerActor(
            self.tokenizer,
            deliver=self._deliver,
            answer=lambda answer: self.gateway.amendments.receive(answer),
            engine=self.scheduler.inbox,
            inbox=PackedChannel(DetokenizerEvent),
        )
        self.scheduler.detokenizer = self.detokenizer.inbox
        self.encoder = PromptEncoder(
            self.tokenizer,
            template=ChatTemplate(template) if template else None,
            limits=PromptLimits(MAX_MODEL_LEN, self.tokenizer.vocab_size),
        )
        self.tokenize_service = TokenizeService()
        self.tokenize_service.open(self.encoder)
        self.tokenizer_actor = TokenizerActor(
            self.encoder,
            detokenizer=self.detokenizer.inbox,
            engine=self.scheduler.inbox,
        )
        self.tokenizer_actor.inbox = PackedChannel(TokenizerEvent)
        inbox = self.tokenizer_actor.inbox
        server_options = ServerOptions(**{"port": 0, **options})
        self.gateway = Gateway(
            submit=inbox.send,
            cancel=inbox.send,
            max_unread_bytes=server_options.max_unread_bytes,
        )
        self.state = ServerState("ready", "", MAX_MODEL_LEN, parsers=parsers)
        self.loras = LoraRegistry(LoraOptions(enable_lora=True))
        self.server = HttpServer(
            HttpContext(
                gateway=self.gateway,
                state=self.state,
                options=server_options,
                model_names=("echo", "parrot"),
                created=1_700_000_000,
                registry=CollectorRegistry(),
                tokenize_service=self.tokenize_service,
                loras=self.loras,
                receipts=receipts,
                keep_alive_s=keep_alive_s,
                heartbeat_s=heartbeat_s,
                peers=peers,
            )
        )
        self.url = ""

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Looks again whenever the scheduler was heard of or a chunk came out."""
        async with asyncio.timeout(60):
            while not is_so():
                self.scheduler.changed.clear()
                await self.scheduler.changed.wait()

    def _deliver(self, chunk: OutputChunk) -> None:
        self.gateway.deliver(chunk)
        self.scheduler.changed.set()

    @property
    def actors(self) -> list[Actor[Any]]:
        return [self.tokenizer_actor, self.scheduler, self.detokenizer]

    @functools.cached_property
    def client(self) -> openai.AsyncOpenAI:
        # No certificates are read, which takes longer than most tests.
        plain = openai.DefaultAsyncHttpxClient(verify=False)
        url = f"{self.url}/v1"
        return openai.AsyncOpenAI(
            base_url=url, api_key="any", max_retries=0, timeout=10, http_client=plain
        )

    async def __aenter__(self) -> EchoEngine:
        for actor in self.actors:
            actor.start(lambda _, error: self.died.append(error))
        self.url = await self.server.start()
        self.web = aiohttp.ClientSession(self.url, timeout=aiohttp.ClientTimeout(total=30))
        return self

    async def ask_from(self, address: str) -> None:
        """From now on `web` connects from that address of this machine."""
        await self.web.close()
        connector = aiohttp.TCPConnector(local_addr=(address, 0))
        self.web = aiohttp.ClientSession(self.url, connector=connector)

    async def __aexit__(self, *_: object) -> None:
        if "client" in self.__dict__:
            await self.client.close()
        await self.web.close()
        await self.server.stop()
        self.tokenize_service.close()
        for actor in self.actors:
            await actor.stop()
        assert not self.died, self.died
