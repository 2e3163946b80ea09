"""Samples tokens and logprobs from logits on MLX arrays, and scores prompts.

The order of the steps is that of sampling/sampler.py: penalties, biases, grammar mask, bans, draw,
logprobs. The plan, the rows' parameters and their lengths are numpy arrays of the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from aserve.gpu.mlx.arrays import Floats, as_words, floats, ints, widen, with_rows
from aserve.gpu.mlx.draw import add_biases, allow, choose, gumbel_noise, penalise
from aserve.gpu.mlx.kv import Table
from aserve.gpu.sampling.namespaces import NamespaceShares
from aserve.gpu.sampling.params import init_columns
from aserve.gpu.sampling.plan import SamplePlan
from aserve.gpu.sampling.token_masks import BanPlan
from aserve.gpu.step.plan import LogitsPlan
from aserve.gpu.step.prompts import PromptPlan
from aserve.gpu.step.results import Layout
from aserve.gpu.transfer.staging import ArrayI64
from aserve.messages.base import ArrayI32
from aserve.messages.step import RowInit
from aserve_kernels.row_columns import FLOAT_COLUMNS, INT_COLUMNS

LogitsOf = Callable[[mx.array], mx.array]  # hidden states [n, hidden] -> [n, vocab]
History = Callable[[ArrayI32, Table], mx.array]  # rows, positions -> token ids of that shape


class RowTables:
    """The sampling parameters of every row on the host. Row 0, the padding, is greedy."""

    __slots__ = ("_floats", "_ints", "_shares")

    def __init__(self, max_rows: int) -> None:
        self._ints = np.zeros((max_rows + 1, len(INT_COLUMNS)), np.int64)
        self._floats = np.zeros((max_rows + 1, len(FLOAT_COLUMNS)), np.float64)
        self._shares = NamespaceShares()

    def write(self, inits: tuple[RowInit, ...]) -> None:
        if inits:
            rows = [init.row for init in inits]
            self._ints[rows], self._floats[rows] = init_columns(inits, self._shares)

    def ints(self, name: str, rows: ArrayI32) -> ArrayI64:
        values: ArrayI64 = self._ints[rows, INT_COLUMNS.index(name)]
        return values

    def floats(self, rows: ArrayI32, *names: str) -> Floats:
        """[rows] for one name, or else [rows, names]."""
        columns = [FLOAT_COLUMNS.index(name) for name in names]
        values: Floats = self._floats[rows[:, None], columns]
        return values[:, 0] if len(names) == 1 else values


@dataclass(frozen=True, slots=True)
class LogitsRows:
    """The rows of n logits rows; a row has one of them at most."""

    rows: ArrayI32  # [n]
    lens: ArrayI32  # [n], tokens before the one to sample
    mask: mx.array | None = None  # int32 [n, words]

    def at(self, part: slice) -> LogitsRows:
        mask = None if self.mask is None else self.mask[part]
        return LogitsRows(self.rows[part], self.lens[part], mask)


@dataclass(frozen=True, slots=True)
class Sampled:
    """The result of n logits rows, of which m have logprobs with k alternatives."""

    tokens: mx.array  # int32 [n]
    is_valid: mx.array  # bool [n]
    chosen: mx.array  # [m]
    top_ids: mx.array  # int32 [m, k]
    top_logprobs: mx.array  # [m, k]

    def pack(self, prompt_words: mx.array | None = None) -> tuple[mx.array, Layout]:
        """Packs them as step/results.py reads them."""
        counts = mx.ones_like(self.tokens)
        parts = [self.tokens, counts, self.is_valid, self.chosen, self.top_ids, self.top_logprobs]
        words = [] if prompt_words is None else [prompt_words]
        num, (num_scored, num_top) = len(self.tokens), self.top_ids.shape
        layout = Layout(num, 1, num, num_scored, num_top, sum(map(len, words)))
        return mx.concatenate([*map(as_words, parts), *words]), layout


class Sampler:
    __slots__ = ("_history", "_tables")

    def __init__(self, tables: RowTables, history: History) -> None:
        """`history` reads the token ids beside the KV cache."""
        self._tables = tables
        self._history = history

    def sample(
        self, plan: LogitsPlan, rows: LogitsRows, logits_of: Callable[[slice], mx.array]
    ) -> Sampled:
        """`logits_of` gives the logits of one slice of the rows."""
        parts: list[Sampled] = []
        start = 0
        for part_plan in plan.slices:
            part = slice(start, start + part_plan.num)
            parts.append(self._sample(widen(logits_of(part)), rows.at(part), part_plan))
            start = part.stop
        return _joined(parts)

    def _sample(self, logits: mx.array, rows: LogitsRows, plan: SamplePlan) -> Sampled:
        raw = logits
        if len(plan.penalised):
            logits = self._penalised(logits, rows, plan)
        if plan.biases.indices:
            logits = add_biases(logits, plan.biases, rows.lens)
        if rows.mask is not None:
            logits = allow(logits, rows.mask)
        if plan.bans is not None:
            logits = self._banned(logits, rows, plan.bans)
        tokens = self._draw(logits, rows, plan).astype(mx.int32)
        # The maximum is NaN if one logit is NaN, and -inf if no token is allowed.
        is_valid = mx.isfinite(logits.max(axis=1))
        return Sampled(tokens, is_valid, *_logprobs(logits, raw, tokens, plan))

    def _penalised(self, logits: mx.array, rows: LogitsRows, plan: SamplePlan) -> mx.array:
        own = rows.rows[plan.penalised]
        lens = rows.lens[plan.penalised][:, None]
        positions = np.broadcast_to(np.arange(lens.max(), dtype=np.int32), (len(own), lens.max()))
        is_real = positions < lens
        is_output = is_real & (positions >= self._tables.ints("prompt_len", own)[:, None])
        names = ("presence_penalty", "frequency_penalty", "repetition_penalty")
        indices = ints(plan.penalised)
        penalised = penalise(
            logits[indices],
            self._history(own[:, None], np.where(is_real, positions, 0)),
            mx.array(is_real),
            mx.array(is_output),
            self._tables.floats(own, *names),
        )
        return with_rows(logits, indices, penalised)

    def _banned(self, logits: mx.array, rows: LogitsRows, plan: BanPlan) -> mx.array:
        """A row's bans are ignored where they would leave it no token that its grammar allows."""
        banned = logits
        if len(plan.restricted):
            restricted = ints(plan.restricted)
            is_allowed = np.zeros((len(plan.restricted), logits.shape[1]), np.bool_)
            is_allowed[plan.allowing, plan.allowed] = True
            own = mx.where(mx.array(is_allowed), logits[restricted], -mx.inf)
            banned = with_rows(logits, restricted, own)
        if len(plan.indices):
            missing = mx.zeros(len(plan.indices), mx.int32)
            if len(plan.word_of):
                missing = missing.at[ints(plan.word_of)].add(self._differs(rows, plan))
            values = mx.where(missing == 0, -mx.inf, 0.0).astype(logits.dtype)
            banned = banned.at[ints(plan.indices), ints(plan.lasts)].add(values)
        is_left = banned.max(axis=1, keepdims=True) > -mx.inf
        return mx.where(is_left, banned, logits)

    def _differs(self, rows: LogitsRows, plan: BanPlan) -> mx.array:
        """Whether the output does not have each earlier id of a bad word at its distance."""
        own = plan.indices[plan.word_of]
        positions = rows.lens[own] - plan.backs
        is_output = positions >= self._tables.ints("prompt_len", rows.rows[own])
        found = self._history(rows.rows[own], positions.clip(min=0))
        was_emitted = mx.array(is_output) & (found == ints(plan.earlier))
        return (~was_emitted).astype(mx.int32)

    def _draw(self, logits: mx.array, rows: LogitsRows, plan: SamplePlan) -> mx.array:
        if not plan.needs_noise:
            return logits.argmax(axis=1)
        tables, own, dtype = self._tables, rows.rows, logits.dtype
        temperature = tables.floats(own, "temperature")[:, None]
        is_drawn = mx.array(temperature > 0)
        noise = gumbel_noise(tables.ints("seed", own), rows.lens, logits.shape[1], dtype)
        scaled = logits / floats(np.where(temperature > 0, temperature, 1.0), dtype)
        noisy = mx.where(is_drawn, scaled + noise, scaled)
        if not plan.needs_filter:
            return noisy.argmax(axis=1)
        top_p, min_p = tables.floats(own, "top_p", "min_p").T
        return choose(scaled, noisy, top_k=tables.ints("top_k", own), top_p=top_p, min_p=min_p)


def _logprobs(
    logits: mx.array, raw: mx.array, tokens: mx.array, plan: SamplePlan
) -> tuple[mx.array, mx.array, mx.array]:
    """Logprobs before temperature, of the processed logits or of the model's own."""
    if not len(plan.scored):
        return mx.zeros(0), mx.zeros((0, 0), mx.int32), mx.zeros((0, 0))
    scored = logits[ints(plan.scored)]
    if len(plan.raw_indices):
        own = raw[ints(plan.scored[plan.raw_indices])]
        scored = with_rows(scored, ints(plan.raw_indices), own)
    scores = _log_softmax(scored)
    chosen = mx.take_along_axis(scores, tokens[ints(plan.scored)][:, None], axis=1)[:, 0]
    return chosen, *_top(scores, plan.num_top)


def _log_softmax(logits: mx.array) -> mx.array:
    return logits - mx.logsumexp(logits, axis=1, keepdims=True)


def _top(scores: mx.array, num: int) -> tuple[mx.array, mx.array]:
    """The ids of the `num` best tokens of each row, and their scores."""
    top_ids = mx.argsort(-scores, axis=1)[:, :num].astype(mx.int32)
    return top_ids, mx.take_along_axis(scores, top_ids, axis=1)


def _joined(parts: list[Sampled]) -> Sampled:
    if len(parts) == 1:
        return parts[0]
    if not parts:
        table = mx.zeros((0, 0))
        return Sampled(mx.zeros(0, mx.int32), mx.zeros(0, mx.bool_), mx.zeros(0), table, table)
    width = max(part.top_ids.shape[1] for part in parts)

    def wide(table: mx.array) -> mx.array:
        return mx.pad(table, [(0, 0), (0, width - table.shape[1])])

    return Sampled(
        tokens=mx.concatenate([part.tokens for part in parts]),
        is_valid=mx.concatenate([part.is_valid for part in parts]),
        chosen=mx.concatenate([part.chosen for part in parts]),
        top_ids=mx.concatenate([wide(part.top_ids) for part in parts]),
        top_logprobs=mx.concatenate([wide(part.top_logprobs) for part in parts]),
    )


def score_prompts(plan: PromptPlan, hidden: mx.array, logits_of: LogitsOf) -> mx.array:
    """hidden [tokens, hidden] -> the words that `step.prompts.read_prompts` reads."""
    words: list[mx.array] = []
    if len(plan.indices):
        parts = [_score(plan, part, hidden, logits_of) for part in plan.slices]
        words = [as_words(mx.concatenate([*column])) for column in zip(*parts, strict=True)]
    last = widen(hidden[ints(plan.last_indices)])
    embeddings = last / mx.maximum(mx.linalg.norm(last, axis=1, keepdims=True), 1e-12)
    return mx.concatenate([*words, as_words(embeddings)])


def _score(
    plan: PromptPlan, part: slice, hidden: mx.array, logits_of: LogitsOf
) -> tuple[mx.array, ...]:
    """Returns chosen, ranks, top_ids and top_logprobs of some scored tokens."""
    logprobs = _log_softmax(widen(logits_of(hidden[ints(plan.indices[part])])))
    chosen = mx.take_along_axis(logprobs, ints(plan.token_ids[part])[:, None], axis=1)
    ranks = 1 + (logprobs > chosen).sum(axis=1)
    return chosen, ranks, *_top(logprobs, plan.max_top)
