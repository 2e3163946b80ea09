"""The compiled draw against the noise and the argmax of torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from aserve.gpu.sampling.draw import add_noise
from aserve.gpu.sampling.gumbel import gumbel_noise
from aserve_kernels.cpu.draw import CHUNK, compile_draw, draw

INF, NAN = torch.inf, torch.nan


@pytest.fixture(autouse=True, scope="module")
def compiled() -> None:
    compile_draw()


def expected(logits: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor) -> Tensor:
    noise = gumbel_noise(seeds, positions, torch.arange(logits.shape[1]), torch.float32)
    return add_noise(logits, noise, temperatures)[1].argmax(dim=1)


@pytest.mark.parametrize("spread", [0.0, 1.0, 20.0])
@pytest.mark.parametrize("vocab", [1, 7, CHUNK, 2 * CHUNK + 3])
def test_tokens_are_those_of_torch_at_every_temperature(vocab: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = spread * torch.randn((96, vocab), generator=generator)
    logits[::5, ::3] = -INF
    logits[:, vocab // 2] = 1.0  # one at least that is allowed
    whole = torch.iinfo(torch.int64)
    seeds = torch.randint(whole.min, whole.max, (96,), generator=generator)
    positions = torch.randint(0, 1 << 20, (96,), generator=generator)
    temperatures = torch.tensor([0.0, 0.1, 1.0, 5.0]).repeat(24)
    tokens, is_valid = draw(logits, seeds, positions, temperatures)
    assert is_valid.all()
    assert torch.equal(tokens, expected(logits, seeds, positions, temperatures))


@pytest.mark.parametrize(
    ("row", "is_valid"),
    [
        ([0.0, -INF, -3.0], True),
        ([-INF, -INF, -INF], False),
        ([0.0, NAN, 1.0], False),
        ([0.0, -NAN, 1.0], False),
        ([0.0, INF, 1.0], False),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_of_no_numbers_is_not_sound(
    row: list[float], temperature: float, is_valid: bool
) -> None:
    beside = [1.0, 2.0, 3.0]
    zeros = torch.zeros(2, dtype=torch.int64)
    got = draw(torch.tensor([row, beside]), zeros, zeros, torch.full((2,), temperature))
    assert got[1].tolist() == [is_valid, True]


def test_the_first_of_equal_logits_is_taken() -> None:
    """Zero and minus zero are equal."""
    logits = torch.tensor([[-1.0, -0.0, 0.0], [0.0, 4.0, 4.0]])
    zeros = torch.zeros(2, dtype=torch.int64)
    assert draw(logits, zeros, zeros, torch.zeros(2))[0].tolist() == [1, 1]
