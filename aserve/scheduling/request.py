"""One sequence (a child of a request), its tokens, and its part in the steps that are in flight.

A sequence has two clocks. `committed_len` is the KV length that came back from the device;
`scheduled_len` is the KV length once everything in flight is back, which is exact, or an upper
bound while it is not certain how many tokens come back. A `Flight` takes the second clock ahead
when it is sent, and the first when it lands. Only `send`, `land`, `drop_flights`, `drop_held` and
`restart` write the clocks and the sums over flights, so that they cannot disagree; check.py counts
them anew in debug mode.
"""

from __future__ import annotations

import hashlib
from array import array
from enum import Enum

import msgspec
import numpy as np

from aserve.cache.allocation import PageAllocation
from aserve.cache.prefix_tree import PageKeys, root_key
from aserve.errors import BugError
from aserve.messages.base import ArrayI32, array_i32
from aserve.messages.executor import DecodeCaps
from aserve.messages.requests import AdmitRequest, SamplingParams
from aserve.messages.step import RowInit
from aserve.scheduling.clients import Client


def child_seed(seed: int, child: int) -> int:
    """The seed of one child of a group: a hash of both; the first child keeps the request's own."""
    if child == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{child}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


class TokenLog:
    """The prompt and the committed outputs of a sequence, int32; `num` tokens. All children of a
    request share the prompt.
    """

    __slots__ = ("_outputs", "_prompt", "num")

    def __init__(self, prompt_ids: ArrayI32, outputs: bytes) -> None:
        self._prompt = prompt_ids
        self._outputs = array("i", outputs)
        self.num = len(prompt_ids) + len(self._outputs)

    def append(self, token_id: int) -> None:
        self._outputs.append(token_id)
        self.num += 1

    def span(self, start: int, stop: int) -> ArrayI32:
        """tokens[start:stop], cut at what is known."""
        num_prompt, stop = len(self._prompt), min(stop, self.num)
        if stop <= num_prompt:
            return self._prompt[start:stop]
        # NOTE: a view of the growing array itself would forbid it to grow.
        outputs = np.asarray(self._outputs[max(start - num_prompt, 0) : stop - num_prompt])
        if start >= num_prompt:
            return outputs
        return np.concatenate([self._prompt[start:], outputs])

    def at(self, position: int) -> int:
        num_prompt = len(self._prompt)
        if position < num_prompt:
            return int(self._prompt[position])
        return self._outputs[position - num_prompt]


class Flight(msgspec.Struct, gc=False, eq=False):
    """One launched step's part of a sequence. If its span reaches the last token that exists or is
    in flight, it `samples`, or it `ends` the sequence where nothing is to be sampled.

    It brings up to `max_outputs` new tokens, of which the last `num_uncertain` may not come, and
    none where it does not sample. With `max_outputs` the KV of `max_advance` more positions counts,
    and of one less for each token that it brings less.
    """

    sequence: Sequence
    iteration: int
    query_len: int
    num_drafts: int
    max_advance: int
    max_outputs: int
    num_uncertain: int
    samples: bool
    ends: bool
    is_prefill: bool
    is_held: bool  # from launch until its Sample is given
    is_dropped: bool = False  # its result will not count


class MaskState(msgspec.Struct, gc=False):
    """The mask of the next output, for a sequence with a host-side sampler."""

    asked: int = -1  # the output position of the last BuildMask
    num_sent: int = 0  # outputs that BuildMasks have carried
    mask: bytes | None = None  # of output position `asked`, once it is there
    is_slow: bool = False  # its masks take long


ONE_TOKEN = DecodeCaps()


class Sequence:
    __slots__ = (
        "allocation",
        "arrival",
        "awaits_kv",
        "bad_word_ids",
        "cached_len",
        "child",
        "client",
        "committed_len",
        "embeds",
        "end_ids",
        "failures",
        "flights",
        "followers",
        "has_ended",
        "is_causal",
        "key_lookahead",
        "keys",
        "last_iteration",
        "leader",
        "lora_slot",
        "mask",
        "max_kv_len",
        "max_len",
        "max_tokens",
        "next_key",
        "num_retracted_for",
        "num_sampling",
        "num_scored",
        "num_uncertain",
        "phase",
        "priority",
        "prompt_len",
        "relay_stamp",
        "remaining",
        "request_id",
        "row",
        "sampling",
        "scheduled_len",
        "seed",
        "tokens",
        "unpaid",
        "written_pages",
    )

    def __init__(
        self,
        request: AdmitRequest,
        *,
        child: int,
        arrival: int,
        client: Client | None = None,
        caps: DecodeCaps = ONE_TOKEN,
    ) -> None:
        prompt_ids = array_i32(request.prompt_ids)
        outputs = request.outputs[child] if request.outputs else b""
        self.request_id = request.request_id
        self.child = child
        self.client = client or Client(request.client)
        self.arrival = arrival
        self.priority = request.priority
        self.sampling: SamplingParams = request.sampling
        assert request.sampling.max_tokens is not None  # the tokenizer actor resolves it
        self.max_tokens: int = request.sampling.max_tokens
        self.seed = child_seed(request.sampling.seed, child)
        self.end_ids = request.end_ids
        self.bad_word_ids = request.bad_word_ids
        self.prompt_len = len(prompt_ids)
        self.max_len = self.prompt_len + self.max_tokens  # tokens
        # KV positions that it can ever need: with a root the last token is sampled, but never
        # computed
        self.max_kv_len = self.prompt_len + max(self.max_tokens - caps.root_len, 0)
        self.tokens = TokenLog(prompt_ids, outputs)
        self.is_causal = request.is_causal
        self.key_lookahead = caps.key_lookahead
        keys = request.page_keys if request.is_causal and not caps.key_lookahead else b""
        self.keys = PageKeys(keys, root=root_key(request.namespace))
        # Waiting sequences that need pages which this one is about to commit, each with their
        # number, and whom this one waits for: followers.py
        self.followers: dict[Sequence, int] = {}
        self.leader: Sequence | None = None
        self.next_key: bytes | None = None
        self.phase = Phase.WAITING
        self.row = 0
        self.allocation: PageAllocation | None = None
        self.flights: list[Flight] = []  # sent and not back, in launch order
        # flights that sample, and the tokens that these may bring or not
        self.num_sampling = self.num_uncertain = 0
        self.restart(0)
        # the stamp of the last launched step that samples this row, 0 after a row init, and the
        # last step that named this row: who waited longest goes first
        self.relay_stamp = self.last_iteration = 0
        # page table entries that the device has; 0: it does not know this row yet
        self.written_pages = 0
        self.cached_len = -1  # prompt tokens from the prefix cache at first admission
        # prompt tokens that its client has not been charged for; known from its first admission on
        self.unpaid = 0
        # rows that were retracted to make way for it, and consecutive failed steps that named only
        # this row
        self.num_retracted_for = self.failures = 0
        self.has_ended = False  # its last token is known
        self.mask = MaskState() if request.sampling.grammar and self.max_tokens else None
        self.embeds, self.lora_slot = request.embeds, request.lora_slot
        self.awaits_kv = request.awaits_kv  # until the KV is there
        # prompt tokens whose logprobs were handed out or are not wanted, token 0 being one of them
        self.num_scored = 1 if _wants_scores(request, child) else self.prompt_len

    @property
    def min_tokens(self) -> int:
        """Outputs before any end. With a grammar the masks see to it, since a language may end
        earlier.
        """
        return 0 if self.mask is not None else self.sampling.min_tokens

    @property
    def num_outputs(self) -> int:
        return self.tokens.num - self.prompt_len

    @property
    def max_cached_len(self) -> int:
        """Positions that a prefix hit may cover: what is wanted of a position is made by computing
        it, the next token at the end, and before that the prompt's scores.
        """
        if not self.is_causal:
            return 0
        if self.num_scored < self.prompt_len:
            return self.num_scored - 1
        return self.tokens.num - 1

    @property
    def cacheable_len(self) -> int:
        """Positions whose KV is there and depends only on the tokens that pages' keys cover."""
        num_known = self.tokens.num - self.key_lookahead
        return max(0, min(self.committed_len, num_known)) if self.is_causal else 0

    @property
    def is_held(self) -> bool:
        return self.mask is not None and any(flight.is_held for flight in self.flights)

    @property
    def has_new_pages(self) -> bool:
        """The device does not have its whole page table."""
        assert self.allocation is not None
        return self.written_pages != self.allocation.num_pages

    @property
    def is_at_end(self) -> bool:
        """Whether no further step may name it: its last token is known, or its outputs, counting
        one for each sampling step in flight, reach max_tokens; where that is 0, the whole prompt is
        in flight.
        """
        if self.tokens.num + self.num_sampling < self.max_len:
            return self.has_ended
        return self.max_tokens > 0 or not self.remaining

    @property
    def _num_prompt_logprobs(self) -> int:
        """The value for a RowInit. A sequence that was retracted does not want them again."""
        wanted = self.sampling.prompt_logprobs
        return -1 if wanted is None or self.num_scored >= self.prompt_len else wanted

    def restart(self, committed_len: int) -> None:
        """Nothing is in flight, and so many positions have KV."""
        assert not self.flights
        self.committed_len = committed_len
        self.scheduled_len = committed_len
        # Tokens that exist or are in flight and have no KV scheduled: `DecodeCaps.root_len` for a
        # decode, more for a prefill, 0 when nothing will be sampled after the prompt.
        self.remaining = self.tokens.num - committed_len

    def send(self, flight: Flight, *, stamp: int) -> None:
        """The flight's step, by whose stamp the relay will know it, is launched."""
        assert self.allocation is not None
        self.flights.append(flight)
        self.last_iteration = flight.iteration
        self.written_pages = self.allocation.num_pages
        self.scheduled_len += flight.max_advance
        self.remaining -= flight.max_advance
        if flight.samples:
            self.relay_stamp = stamp
            self.num_sampling += 1
            self.num_uncertain += flight.num_uncertain
            self.remaining += flight.max_outputs

    def land(self, flight: Flight, *, advance: int) -> None:
        """Flights come back in the order in which they were sent; `advance` positions of this one
        have KV that counts. What it sampled was appended to the tokens.
        """
        first = self.flights.pop(0)
        assert first is flight
        self.committed_len += advance
        self.scheduled_len += advance - flight.max_advance
        self.num_sampling -= flight.samples
        self.num_uncertain -= flight.num_uncertain

    def drop_flights(self) -> None:
        for flight in self.flights:
            flight.is_dropped = True
        self.flights.clear()
        self.num_sampling = 0
        self.num_uncertain = 0
        self.restart(self.committed_len)

    def drop_held(self) -> None:
        """Drops the flights that wait for a mask: of a sequence that has just left its row."""
        for flight in self.flights:
            flight.is_dropped = flight.is_held
            if flight.is_held:
                self.num_sampling -= 1
                self.num_uncertain -= flight.num_uncertain
        self.flights = [flight for flight in self.flights if not flight.is_held]

    def move(self, phase: Phase) -> None:
        check_move(self.phase, phase)
        self.phase = phase

    def page_keys(self, page_size: int) -> PageKeys:
        """Chain keys of every whole page of known tokens, as far as others may use it. The key of a
        page covers `key_lookahead` tokens more than the page.
        """
        if not self.is_causal:
            return self.keys
        ahead = self.key_lookahead
        for page in range(len(self.keys), (self.tokens.num - ahead) // page_size):
            start = page * page_size + ahead if page else 0
            self.keys.append(self.tokens.span(start, (page + 1) * page_size + ahead))
        return self.keys

    def row_init(self) -> RowInit:
        sampling = self.sampling
        return RowInit(
            row=self.row,
            seed=self.seed,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            prompt_len=self.prompt_len,
            min_len=self.prompt_len + self.min_tokens,
            end_ids=self.end_ids,
            logit_bias=sampling.logit_bias,
            num_logprobs=-1 if sampling.logprobs is None else sampling.logprobs,
            raw_logprobs=sampling.raw_logprobs,
            allowed_ids=sampling.allowed_token_ids and sampling.allowed_token_ids + self.end_ids,
            bad_word_ids=self.bad_word_ids,
            num_prompt_logprobs=self._num_prompt_logprobs,
            lora_slot=self.lora_slot,
            embeds=self.embeds,
        )


def _wants_scores(request: AdmitRequest, child: int) -> bool:
    """All children have the same prompt. One that was computed elsewhere was scored there, and who
    has outputs already was given the scores first.
    """
    is_scored = request.sampling.prompt_logprobs is not None and not request.awaits_kv
    return is_scored and child == 0 and not any(request.outputs[:1])


class Phase(Enum):
    WAITING = "waiting"  # owns nothing; in the waiting queue
    AWAITING_KV = "awaiting KV"  # owns a row and pages, which a transfer fills
    RUNNING = "running"  # owns a row and pages
    LINGERING = "lingering"  # retracted: owns nothing, but results of it are still in flight
    ENDED = "ended"  # owns nothing; Retired was sent


MOVES: dict[Phase, frozenset[Phase]] = {
    Phase.WAITING: frozenset({Phase.AWAITING_KV, Phase.RUNNING, Phase.ENDED}),
    Phase.AWAITING_KV: frozenset({Phase.RUNNING, Phase.ENDED}),
    Phase.RUNNING: frozenset({Phase.WAITING, Phase.LINGERING, Phase.ENDED}),
    Phase.LINGERING: frozenset({Phase.WAITING, Phase.ENDED}),
    Phase.ENDED: frozenset(),
}


def check_move(before: Phase, after: Phase) -> None:
    if after not in MOVES[before]:
        raise BugError(f"a sequence cannot move from {before.value} to {after.value}")
