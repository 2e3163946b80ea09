"""The host's plan of a step's sampling: which rows need noise, filters, penalties, biases, bans or
logprobs. Most rows need little, and what no row needs is skipped.

`RowParams` is written by the executor thread, once per request.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from aserve.gpu.sampling.token_masks import BanPlan, RowBans, plan_bans
from aserve.gpu.transfer.staging import HostArrays
from aserve.messages.base import MAX_INT32, ArrayI32
from aserve.messages.step import RowInit

PLAIN = 0
NOISE = 1
FILTER = 2
PENALTY = 4
BIAS = 8  # a logit bias, or end tokens before the minimum length
BAN = 16  # allowed ids, or bad words
SCORE = 32  # logprobs
NO_INDICES = np.empty(0, np.int32)


class RowParams:
    """The host's copy of every row's sampling parameters. Row 0, the padding row, is greedy."""

    __slots__ = (
        "_bans",
        "_embedded_lens",
        "_inits",
        "_needs",
        "_num_logprobs",
        "_num_prompt_logprobs",
        "_prompt_wants",
        "_raw_logprobs",
        "_scored_lens",
        "_top_k",
    )

    def __init__(self, max_rows: int) -> None:
        self._needs = np.zeros(max_rows + 1, np.uint8)
        self._top_k = np.zeros(max_rows + 1, np.int32)
        self._num_logprobs = np.full(max_rows + 1, -1, np.int32)
        self._raw_logprobs = np.zeros(max_rows + 1, np.bool_)
        self._num_prompt_logprobs = np.full(max_rows + 1, -1, np.int32)
        self._scored_lens = np.zeros(max_rows + 1, np.int32)
        self._embedded_lens = np.full(max_rows + 1, -1, np.int32)
        self._prompt_wants: set[int] = set()  # rows whose prompt is scored or embedded
        self._inits: dict[int, RowInit] = {}
        self._bans: dict[int, RowBans] = {}  # of rows with allowed ids or bad words

    def write(self, inits: Iterable[RowInit]) -> None:
        for init in inits:
            self._needs[init.row] = _needs(init)
            self._top_k[init.row] = init.top_k
            self._num_logprobs[init.row] = init.num_logprobs
            self._raw_logprobs[init.row] = init.raw_logprobs
            self._inits[init.row] = init
            if self._needs[init.row] & BAN:
                self._bans[init.row] = RowBans(init)
            self._write_prompt_wants(init)

    def _write_prompt_wants(self, init: RowInit) -> None:
        is_scored = init.num_prompt_logprobs >= 0
        self._num_prompt_logprobs[init.row] = init.num_prompt_logprobs
        self._scored_lens[init.row] = init.prompt_len - 1 if is_scored else 0
        self._embedded_lens[init.row] = init.prompt_len if init.embeds else -1
        if is_scored or init.embeds:
            self._prompt_wants.add(init.row)
        else:
            self._prompt_wants.discard(init.row)

    def plan(self, rows: ArrayI32, *, max_len: int, vocab_size: int) -> SamplePlan:
        """rows int32 [n], one per logits row."""
        needs = self._needs[rows]
        # PERF: most steps need none of these, and each numpy call takes a microsecond.
        every = int(np.bitwise_or.reduce(needs, initial=PLAIN))

        def indices(kind: int) -> ArrayI32:
            return _indices(needs, kind) if every & kind else NO_INDICES

        scored, raw_indices, num_top = indices(SCORE), NO_INDICES, 0
        if len(scored):
            raw_indices = _indices(self._raw_logprobs[rows[scored]])
            num_top = min(int(self._num_logprobs[rows[scored]].max()), vocab_size)
        return SamplePlan(
            num=len(rows),
            max_len=max_len,
            needs_noise=bool(every & NOISE),
            needs_filter=bool(every & FILTER),
            max_top_k=self._max_top_k(rows, vocab_size) if every & FILTER else 0,
            penalised=indices(PENALTY),
            biases=self._biases(rows, indices(BIAS)),
            bans=self._plan_bans(rows, indices(BAN)),
            scored=scored,
            raw_indices=raw_indices,
            num_top=num_top,
        )

    def _max_top_k(self, rows: ArrayI32, vocab_size: int) -> int:
        top_k = self._top_k[rows]
        return int(np.where(top_k < vocab_size, top_k, 0).max(initial=0))

    def num_logprobs(self, rows: ArrayI32) -> ArrayI32:
        return self._num_logprobs[rows]

    def _plan_bans(self, rows: ArrayI32, banned: ArrayI32) -> BanPlan | None:
        if not len(banned):
            return None
        return plan_bans(banned, [self._bans[int(row)] for row in rows[banned]])

    @property
    def have_prompt_wants(self) -> bool:
        """Whether any row's prompt is to be scored or embedded."""
        return bool(self._prompt_wants)

    def num_prompt_logprobs(self, rows: ArrayI32) -> ArrayI32:
        return self._num_prompt_logprobs[rows]

    def scored_lens(self, rows: ArrayI32) -> ArrayI32:
        """Returns the number of prompt positions that score the token after them: all but the last,
        or none.
        """
        return self._scored_lens[rows]

    def embedded_lens(self, rows: ArrayI32) -> ArrayI32:
        """Returns the KV length at which a row's embedding is taken; -1 where none is wanted."""
        return self._embedded_lens[rows]

    def _biases(self, rows: ArrayI32, biased: ArrayI32) -> LogitBiases:
        indices: list[int] = []
        token_ids: list[int] = []
        values: list[float] = []
        min_lens: list[int] = []
        for index in biased:
            init = self._inits[int(rows[index])]
            until = init.min_len if init.min_len > init.prompt_len else 0
            ends = init.end_ids if until else ()
            entries = [*init.logit_bias, *((token_id, -np.inf) for token_id in ends)]
            indices += [int(index)] * len(entries)
            token_ids += [token_id for token_id, _ in entries]
            values += [value for _, value in entries]
            min_lens += [ALWAYS] * len(init.logit_bias) + [until] * len(ends)
        return LogitBiases(indices, token_ids, values, min_lens)


ALWAYS = MAX_INT32  # the length below which a bias counts


@dataclass(frozen=True, slots=True)
class LogitBiases:
    """Four columns of the same length: logits[index, token_id] += value while the row has fewer
    than `until` tokens."""

    indices: list[int]
    token_ids: list[int]
    values: list[float]
    until: list[int]


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """The sampling of `num` logits rows. Indices of logits rows are relative to these."""

    num: int
    max_len: int  # bound of every row's history
    needs_noise: bool
    needs_filter: bool
    max_top_k: int
    penalised: ArrayI32  # indices of logits rows with penalties
    biases: LogitBiases
    bans: BanPlan | None
    scored: ArrayI32  # indices of logits rows with logprobs
    raw_indices: ArrayI32  # indices into `scored` of rows that want the unprocessed logprobs
    num_top: int  # the largest number of alternatives that any row wants

    @property
    def is_plain(self) -> bool:
        """Whether the logits are drawn from as they are, without logprobs."""
        return not (self.adds_to_logits or len(self.scored)) and self.bans is None

    @property
    def adds_to_logits(self) -> bool:
        return bool(len(self.penalised) or self.biases.indices)

    def stage(self, arrays: HostArrays, prefix: str) -> None:
        arrays.add(f"{prefix}.penalised", self.penalised)
        arrays.add(f"{prefix}.scored", self.scored)
        arrays.add(f"{prefix}.raw_indices", self.raw_indices)
        arrays.add(f"{prefix}.raw", self.scored[self.raw_indices])
        biases = self.biases
        arrays.add(f"{prefix}.indices", np.array(biases.indices, np.int32))
        arrays.add(f"{prefix}.token_ids", np.array(biases.token_ids, np.int32))
        arrays.add(f"{prefix}.until", np.array(biases.until, np.int32))
        arrays.add_wide(f"{prefix}.values", np.array(biases.values, np.float64))
        if self.bans is not None:
            self.bans.stage(arrays, f"{prefix}.bans")


def _needs(init: RowInit) -> int:
    needs = PLAIN
    if init.temperature > 0:
        needs |= NOISE
        if init.top_k > 0 or init.top_p < 1 or init.min_p > 0:
            needs |= FILTER
    if init.presence_penalty or init.frequency_penalty or init.repetition_penalty != 1:
        needs |= PENALTY
    if init.logit_bias or (init.end_ids and init.min_len > init.prompt_len):
        needs |= BIAS
    if init.allowed_ids or init.bad_word_ids:
        needs |= BAN
    if init.num_logprobs >= 0:
        needs |= SCORE
    return needs


def _indices(needs: npt.NDArray[np.uint8 | np.bool_], kind: int = 1) -> ArrayI32:
    return np.flatnonzero(needs & kind).astype(np.int32)
