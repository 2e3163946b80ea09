"""One sequence (a child of a request): its tokens, its phase, and what it holds.

Its lengths and counts stand in the columns of rows.py while it has a row.
"""

from __future__ import annotations

import hashlib
from enum import Enum

from aserve.cache.allocation import PageAllocation
from aserve.cache.page_keys import PageKeys
from aserve.errors import BugError
from aserve.messages.base import num_values
from aserve.messages.executor import DecodeCaps
from aserve.messages.requests import AdmitRequest, SamplingParams
from aserve.picture import page_digests
from aserve.scheduling.clients import Client
from aserve.scheduling.reasoning import Reasoning
from aserve.scheduling.rows import NO_CELLS, Cell, Cells, RemainingCell, RowTable, restart_cells
from aserve.scheduling.token_log import MaskState, TokenLog, max_kv_len, up_to_block, whole_blocks


def child_seed(seed: int, child: int) -> int:
    """Returns the seed of one child of a group: a hash of both; the first child keeps the request's
    own.
    """
    if child == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{child}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


ONE_TOKEN = DecodeCaps()


class Sequence:
    committed_len = Cell()
    scheduled_len = Cell()
    remaining = RemainingCell()
    num_flights = Cell()
    num_sampling = Cell()
    num_uncertain = Cell()
    first_iteration = Cell()
    last_iteration = Cell()
    relay_stamp = Cell()
    written_pages = Cell()
    is_blocked = Cell()
    unpaid = Cell()
    failures = Cell()
    cached_len = Cell()

    __slots__ = (
        *("allocation", "arrival", "awaits_kv", "bad_word_ids", "block_len", "cells", "child"),
        *("client", "embeds", "end_ids", "followers", "has_ended", "is_causal", "is_recurrent"),
        *("key_lookahead", "keys", "leader", "lora_slot", "mask", "max_kv_len", "max_len"),
        *("max_step_tokens", "max_tokens", "may_load", "next_key", "num_retracted_for"),
        *("num_scored", "num_stored", "phase", "pictures", "prediction_ids", "priority"),
        *("prompt_len", "reasoning", "request_id", "row", "sampling", "seed", "sends_kv", "tokens"),
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
        outputs = request.outputs[child] if request.outputs else b""
        self.request_id = request.request_id
        self.child = child
        self.client = client or Client(request.client)
        self.arrival = arrival
        self.priority = request.priority
        self.sampling: SamplingParams = request.sampling
        assert request.sampling.max_tokens is not None  # the tokenizer actor resolves it
        self.seed = child_seed(request.sampling.seed, child)
        self.end_ids = request.end_ids
        self.bad_word_ids = request.bad_word_ids
        self.prompt_len = num_values(request.prompt_ids)
        self.set_max_tokens(request.sampling.max_tokens, caps)
        self.tokens = TokenLog(request.prompt_ids, outputs)
        self.is_causal = request.is_causal
        self.max_step_tokens = caps.most_tokens(is_predicted=bool(request.prediction_ids))
        self.key_lookahead, self.block_len = caps.key_lookahead, caps.block_len
        self.is_recurrent = caps.is_recurrent
        has_keys = request.is_causal and not caps.key_lookahead and caps.block_len == 1
        keys = request.page_keys if has_keys else b""
        self.keys = PageKeys(keys, namespace=request.namespace)
        # Waiting sequences that need pages which this one is about to commit, each with their
        # number, and whom this one waits for: followers.py
        self.followers: dict[Sequence, int] | None = None
        self.leader: Sequence | None = None
        self.next_key: bytes | None = None
        self.phase = Phase.WAITING
        self.row = 0
        self.allocation: PageAllocation | None = None
        self.cells: Cells = NO_CELLS
        self.num_retracted_for = 0  # rows that were retracted to make way for it
        self.has_ended = False  # its last token is known
        self.mask = MaskState() if request.sampling.grammar and self.max_tokens else None
        tags = request.reasoning
        self.reasoning = None if tags is None or not self.max_tokens else Reasoning(tags)
        self.embeds, self.pictures = request.embeds, request.pictures
        self.lora_slot, self.prediction_ids = request.lora_slot, request.prediction_ids
        # `awaits_kv` holds until the KV is there
        self.awaits_kv, self.sends_kv = request.awaits_kv, request.sends_kv
        # Pages up to which the tiers below the prefix cache had its KV when it was last looked at;
        # it asks them until they fail to bring what they said that they have.
        self.num_stored, self.may_load = 0, True
        # prompt tokens whose logprobs were handed out or are not wanted, token 0 being one of them
        self.num_scored = 1 if _wants_scores(request, child) else self.prompt_len

    def set_max_tokens(self, max_tokens: int, caps: DecodeCaps) -> None:
        """`max_len` are tokens, and `max_kv_len` the KV positions that it can ever need."""
        self.max_tokens = max_tokens
        self.max_len = self.prompt_len + max_tokens
        self.max_kv_len = max_kv_len(self.prompt_len, max_tokens, caps)

    @property
    def rank(self) -> int:
        """The data-parallel rank that has its pages."""
        assert self.allocation is not None
        return self.allocation.rank

    @property
    def min_tokens(self) -> int:
        """Outputs before any end. With a grammar the masks see to it, since a language may end
        earlier.
        """
        return 0 if self.mask is not None else self.sampling.min_tokens

    @property
    def look_len(self) -> int:
        """Tokens from which on each new one may be its last, or end its reasoning."""
        is_limited = self.reasoning is not None and self.reasoning.is_limited
        return 0 if self.mask is not None or is_limited else self.max_len

    @property
    def num_outputs(self) -> int:
        return len(self.tokens.outputs)

    @property
    def stop_id(self) -> int | None:
        """Its last output, if that is an id that ends it."""
        outputs = self.tokens.outputs
        return (
            outputs[-1] if len(outputs) > self.min_tokens and outputs[-1] in self.end_ids else None
        )

    @property
    def is_at_end(self) -> bool:
        """Whether its last output is known."""
        return 0 < self.max_tokens <= self.num_outputs or self.stop_id is not None

    @property
    def uncut_len(self) -> int:
        """The most tokens that it must ever compute in one step."""
        if not self.is_causal:
            return self.prompt_len
        return max([self.block_len, *(p.num_tokens for p in self.pictures if p.sees_itself)])

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
        if not self.is_causal:
            return 0
        num_committed = self.tokens.final_len(self.committed_len, self.block_len)
        return max(0, min(num_committed, self.tokens.num - self.key_lookahead))

    def take_row(self, table: RowTable, row: int) -> None:
        assert self.allocation is not None
        copies = (
            self.tokens.num,
            self.tokens.at(self.tokens.num - 1),
            self.allocation.num_pages,
            self.child,
            self.max_len,
            self.max_kv_len,
            self.max_tokens,
            0 if self.is_causal else self.prompt_len,
            self.mask is not None,
            self.look_len,
            self.max_step_tokens,
        )
        self.cells, self.row = table.enter(row, self.cells, copies=copies), row
        table.sequences[row], table.request_ids[row] = self, self.request_id
        table.clients[row], table.appends[row] = self.client, self.tokens.outputs.append

    def leave_row(self, table: RowTable) -> None:
        """It keeps nothing on the device."""
        self.cells, self.row = table.leave(self.row, self.cells), 0
        self.allocation = None
        self.committed_len = 0
        self.relay_stamp = 0
        self.written_pages = 0

    def restart(self, committed_len: int) -> None:
        """Nothing is in flight, and so many positions have KV. What is behind is prefilled."""
        self.tokens.prefill_len = self.tokens.num
        restart_cells(self, committed_len)

    def move(self, phase: Phase) -> None:
        check_move(self.phase, phase)
        self.phase = phase

    def page_keys(self, page_size: int) -> PageKeys:
        """Chain keys of every whole page of known tokens, as far as others may use it. The key of a
        page covers `key_lookahead` tokens more than the page, and all tokens of the page's blocks.
        """
        keys, ahead = self.keys, self.key_lookahead
        if not self.is_causal:
            return keys
        num_pages = (whole_blocks(self.tokens.num, self.block_len) - ahead) // page_size
        for page in range(len(keys), num_pages):
            start = up_to_block(page * page_size, self.block_len) + ahead if page else 0
            stop = up_to_block((page + 1) * page_size, self.block_len) + ahead
            digests = page_digests(self.pictures, start, stop) if self.pictures else b""
            keys.append(self.tokens.packed(start, stop) + digests)
        return keys


def _wants_scores(request: AdmitRequest, child: int) -> bool:
    """All children have the same prompt. One that was computed elsewhere was scored there, and who
    has outputs already was given the scores first.
    """
    if child or request.sampling.prompt_logprobs is None:
        return False
    return not request.awaits_kv and not any(request.outputs[:1])


class Phase(Enum):
    WAITING = "waiting"  # owns nothing; in the waiting queue
    AWAITING_KV = "awaiting KV"  # owns a row and pages, which a transfer fills
    RUNNING = "running"  # owns a row and pages
    LINGERING = "lingering"  # retracted: owns nothing, but results of it are still in flight
    ENDED = "ended"  # owns nothing; Retired was sent

    __hash__ = object.__hash__  # PERF: that of Enum is written in Python


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
