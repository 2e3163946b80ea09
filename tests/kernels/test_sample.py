"""The sampling kernels against the reference, which sorts, and against the noise of the sampler."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from aserve.gpu.sampling.gumbel import gumbel_noise
from aserve_kernels import sample as kernel
from aserve_kernels.gumbel import gumbel, gumbel_ref, gumbel_start
from aserve_kernels.sample import sample, sample_ref
from tests.kernels.sample_case import Row, draw_logits, make_tables

SPLIT = 512  # of these tests: the interpreter is slow
VOCAB_SIZES = [1, SPLIT, 2 * SPLIT + 300]
GREEDY = Row(temperature=0.0)
MIXED = Row(temperature=5.0, top_k=7, top_p=0.6, min_p=0.05)
LIMITED = (
    Row(temperature=0.7, top_k=20, top_p=0.95),
    Row(temperature=3.0, top_k=3),
    MIXED,
    GREEDY,
    Row(),
    Row(temperature=2.0, top_k=1),
    Row(temperature=1.5, top_p=0.3),
    Row(temperature=1.5, min_p=0.3),
    Row(temperature=0.0, top_k=5, top_p=0.1, min_p=0.5),
    Row(top_k=1 << 20, top_p=0.999),
    Row(top_p=0.0),
)


@pytest.fixture(autouse=True)
def _small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "SPLIT", SPLIT)


def positions_of(num: int) -> Tensor:
    return torch.arange(num) * 1000 + 17


def assert_draws(
    logits: Tensor, rows: list[Row], *, has_noise: bool = True, has_limits: bool = True
) -> Tensor:
    indices, *tables = make_tables(rows)
    given = logits.clone()
    arguments = (logits, indices, positions_of(len(rows)), *tables)
    got, is_valid = sample(*arguments, has_noise=has_noise, has_limits=has_limits)
    expected, expected_valid = sample_ref(*arguments, has_noise=has_noise, has_limits=has_limits)
    assert torch.equal(got, expected)
    assert torch.equal(is_valid, expected_valid)
    assert torch.equal(logits, given)
    return got


def test_the_noise_is_that_of_the_sampler() -> None:
    seeds = torch.tensor([0, 1, -1, 1 << 62, -(1 << 63)])
    positions = torch.tensor([0, 5, 131_071, 2, 3])
    expected = gumbel_noise(seeds, positions, torch.arange(1000), torch.float32)
    assert torch.equal(gumbel_ref(seeds, positions, 1000), expected)


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_greedy_rows_get_the_best_token(vocab_size: int) -> None:
    logits = draw_logits(3, vocab_size)
    got = assert_draws(logits, [GREEDY] * 3, has_noise=False, has_limits=False)
    assert torch.equal(got, logits.argmax(dim=1))


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_noisy_rows_get_the_best_noisy_token(vocab_size: int) -> None:
    rows = [Row(temperature=temperature) for temperature in (0.0, 0.3, 1.0, 1.7)]
    assert_draws(draw_logits(4, vocab_size), rows, has_limits=False)


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_limited_rows_get_the_best_noisy_token_of_their_set(vocab_size: int) -> None:
    rows = list(LIMITED if vocab_size <= SPLIT else LIMITED[:3])
    assert_draws(draw_logits(len(rows), vocab_size), rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_noise", [False, True])
def test_16_bit_logits_need_no_widening(dtype: torch.dtype, has_noise: bool) -> None:
    logits = draw_logits(3, SPLIT + 9).to(dtype)
    rows = [GREEDY, LIMITED[0], MIXED] if has_noise else [GREEDY] * 3
    indices, ints, floats = make_tables(rows)

    def draw(from_logits: Tensor) -> Tensor:
        given = (from_logits, indices, positions_of(3), ints, floats)
        return sample(*given, has_noise=has_noise, has_limits=has_noise)[0]

    assert torch.equal(draw(logits), draw(logits.float()))


def test_where_all_candidates_are_outside_the_set_is_searched() -> None:
    """Noise mostly lifts tokens that may not be drawn."""
    limits = [
        Row(temperature=9.0, top_k=3),
        Row(temperature=9.0, top_k=40, top_p=0.5),
        Row(temperature=5.0, top_p=0.1),
        Row(temperature=9.0, min_p=0.7),
    ]
    got = assert_draws(draw_logits(1, 500).repeat(12, 1), limits * 3)
    assert all(len(got[number::4].unique()) > 1 for number in range(4))


def test_a_set_of_more_than_a_split_is_searched_for_among_all() -> None:
    assert_draws(torch.zeros((2, 4 * SPLIT)), [Row(top_p=0.4), Row(top_k=SPLIT + 3)])


def test_equal_logits_rank_by_token_id() -> None:
    """Four values for 500 tokens: the set ends within many equals."""
    logits = torch.randint(0, 4, (5, 500), generator=torch.Generator().manual_seed(1)).float()
    logits[:, :3] = -0.0
    limits = ((1, 0.2), (5, 1.0), (170, 1.0), (170, 0.7), (0, 0.2))
    rows = [Row(temperature=4.0, top_k=k, top_p=p) for k, p in limits]
    assert_draws(logits, rows)


# The result of an invalid row is not used, but numpy, which the interpreter computes with, warns.
@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
def test_rows_without_a_token_to_draw_are_not_valid() -> None:
    logits = draw_logits(6, 300)
    logits[0, 7] = torch.nan
    logits[1] = -torch.inf
    logits[2, 8] = torch.inf
    logits[3, 1:] = -torch.inf
    logits[4, ::2] = -torch.inf
    indices, *tables = make_tables([Row(temperature=0.9, top_k=30, top_p=0.9)] * 6)
    for has_limits in (False, True):
        given = (logits, indices, positions_of(6), *tables)
        tokens, is_valid = sample(*given, has_noise=True, has_limits=has_limits)
        assert is_valid.tolist() == [False, False, False, True, True, True]
        assert tokens[3] == 0
        assert tokens[4] % 2 == 1
        assert ((tokens >= 0) & (tokens < 300)).all()


def test_a_row_alone_has_the_same_token_as_among_others() -> None:
    rows = [GREEDY, LIMITED[0], LIMITED[1], MIXED]
    logits, positions = draw_logits(4, SPLIT + 50), positions_of(4)
    indices, *tables = make_tables(rows)

    def draw(part: slice) -> Tensor:
        given = (logits[part], indices[part], positions[part], *tables)
        return sample(*given, has_noise=True, has_limits=True)[0]

    together = draw(slice(None))
    for one in (slice(1, 2), slice(3, 4)):
        assert torch.equal(draw(one), together[one])


def test_the_set_may_end_among_equals_of_several_splits() -> None:
    """All logits are equal: the first five tokens, or those before half of their mass."""
    rows = [Row(top_k=5), Row(top_k=5, top_p=0.5)] * 3
    got = assert_draws(torch.zeros((6, SPLIT + 100)), rows)
    assert got.max() < 5
    assert set(got[1::2].tolist()) > {0}


def test_small_u_keep_their_digits_as_large_noise() -> None:
    seeds, positions = torch.tensor([3]), torch.tensor([8])
    got = torch.empty((1, 1 << 16))
    _noise[(1,)](seeds, positions, got, got.shape[1])
    expected = gumbel_ref(seeds, positions, got.shape[1])
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@triton.jit
def _noise(seeds: tl.tensor, positions: tl.tensor, out: tl.tensor, BLOCK: tl.constexpr) -> None:
    tokens = tl.arange(0, BLOCK)
    start = gumbel_start(tl.load(seeds), tl.load(positions))
    tl.store(out + tokens, gumbel(start, tokens))
