"""Sampling against a naive recomputation from the whole history, row by row."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aserve.messages.step import RowInit
from tests.gpu.batch_builder import greedy
from tests.gpu.device_tables import MAX_ROWS
from tests.gpu.naive_sampler import naive_logits, naive_token
from tests.gpu.sampler_run import DrawAt, run_sampler

VOCAB = 40


@dataclass(frozen=True)
class Row:
    init: RowInit
    history: list[int]
    allowed: list[int]


@st.composite
def rows(draw: st.DrawFn, row: int) -> Row:
    history = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30))
    prompt_len = draw(st.integers(1, len(history)))
    ids = st.integers(0, VOCAB - 1)
    init = greedy(
        row,
        seed=draw(st.integers(-(2**63), 2**64)),
        temperature=draw(st.sampled_from([0.0, 0.5, 1.0, 3.0])),
        top_k=draw(st.sampled_from([0, 1, 3, 20, 60])),
        top_p=draw(st.sampled_from([1.0, 0.9, 0.3, 0.0])),
        min_p=draw(st.sampled_from([0.0, 0.05, 0.5, 1.0])),
        presence_penalty=draw(st.sampled_from([0.0, 1.0, -0.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.5, -0.3])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.5, 0.7])),
        prompt_len=prompt_len,
        min_len=draw(st.sampled_from([0, prompt_len + 2, len(history) + 1])),
        end_ids=draw(st.sampled_from([(), (0, 7)])),
        logit_bias=draw(st.sampled_from([(), ((7, 2.0), (9, -100.0), (11, 1.0))])),
        num_logprobs=draw(st.sampled_from([-1, 0, 1, 4])),
        raw_logprobs=draw(st.booleans()),
        allowed_ids=draw(st.sampled_from([(), (), (0, 1, 2, 5, 7, 30), (30, 31)])),
        bad_word_ids=tuple(_bad_words(draw, history)),
    )
    allowed = draw(st.lists(ids, min_size=3, max_size=30, unique=True))
    return Row(init, history, allowed)


def _bad_words(draw: st.DrawFn, history: list[int]) -> Iterator[tuple[int, ...]]:
    """Of words that were emitted or nearly so."""
    for last in draw(st.lists(st.sampled_from([0, 1, 2, 5, 7, 9, 39]), max_size=4)):
        num_before = draw(st.integers(0, min(4, len(history))))
        before = history[len(history) - num_before :]
        is_other = draw(st.booleans())
        if before and is_other:
            before[draw(st.integers(0, num_before - 1))] = draw(st.integers(0, VOCAB - 1))
        yield (*before, last)


def sampled_alike(cases: Sequence[Row], logits: Tensor, *, is_masked: bool) -> None:
    """Tokens and logprobs of all rows are those of the naive sampler."""
    drawn = [DrawAt(case.init.row, len(case.history)) for case in cases]
    mask = torch.stack([_words(case.allowed) for case in cases]) if is_masked else None
    got = run_sampler(logits, [c.init for c in cases], [c.history for c in cases], drawn, mask=mask)
    scored = 0
    for place, case in enumerate(cases):
        allowed = case.allowed if is_masked else None
        expected = naive_logits(logits[place].numpy(), case.history, case.init, allowed)
        assert int(got.tokens[place]) == naive_token(expected, len(case.history), case.init)
        if case.init.num_logprobs < 0:
            continue
        scores = logits[place].numpy() if case.init.raw_logprobs else expected
        logprobs = scores - np.logaddexp.reduce(scores)
        chosen = logprobs[int(got.tokens[place])]
        np.testing.assert_allclose(got.chosen[scored].item(), chosen, rtol=1e-5, atol=1e-5)
        best = sorted(range(VOCAB), key=lambda token: -logprobs[token])[: case.init.num_logprobs]
        top = got.top_ids[scored, : len(best)].tolist()
        is_finite = np.isfinite(logprobs[best])  # forbidden tokens have no order
        assert [t for t, f in zip(top, is_finite, strict=True) if f] == [
            t for t, f in zip(best, is_finite, strict=True) if f
        ]
        np.testing.assert_allclose(
            got.top_logprobs[scored, : len(best)].numpy(), logprobs[best], rtol=1e-5, atol=1e-5
        )
        scored += 1
    assert len(got.chosen) == scored
    assert bool(got.is_valid.all())


@pytest.mark.slow
@settings(max_examples=100)
@given(st.data(), st.integers(1, MAX_ROWS), st.integers(0, 2**32), st.booleans())
def test_any_rows_get_the_naive_samplers_tokens_and_logprobs(
    data: st.DataObject, num_rows: int, seed: int, is_masked: bool
) -> None:
    cases = [data.draw(rows(row)) for row in range(1, num_rows + 1)]
    cases = [without_banned(case) for case in cases] if is_masked else cases
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((num_rows, VOCAB), generator=generator, dtype=torch.float64) * 3
    sampled_alike(cases, logits, is_masked=is_masked)


def without_banned(case: Row) -> Row:
    """A mask that leaves at least one token beside the end ids."""
    return dataclasses.replace(case, allowed=sorted({*case.allowed, 1, 2}))


def _words(allowed: Sequence[int]) -> Tensor:
    words = np.zeros(-(-VOCAB // 32), np.uint32)
    for token in allowed:
        words[token // 32] |= np.uint32(1 << (token % 32))
    return torch.from_numpy(words.view(np.int32))


def test_a_row_with_a_nan_or_nothing_allowed_is_not_sound_and_its_neighbour_is() -> None:
    logits = torch.randn((3, VOCAB), generator=torch.Generator().manual_seed(3))
    logits[0, 5] = torch.nan
    logits[2] = -torch.inf
    inits = [greedy(row, temperature=1.0, top_p=0.9) for row in (1, 2, 3)]
    drawn = [DrawAt(row, 1) for row in (1, 2, 3)]
    got = run_sampler(logits, inits, [[0]] * 3, drawn)
    assert got.is_valid.tolist() == [False, True, False]
