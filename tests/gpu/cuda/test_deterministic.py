"""`--deterministic`: a request's tokens and logprobs are the same bits alone, among 255 others, in
chunks, computed again, and with graphs or without.
"""

from __future__ import annotations

from typing import Any

import pytest

from aserve.messages import AdmitRequest
from tests.gpu.drive import Served, request
from tests.gpu.test_deterministic import NAME, others, prompt, served, the_one

pytestmark = pytest.mark.slow

KEY = (NAME, 0)
DEVICES = [("cpu", 8), pytest.param("cuda", 255, marks=pytest.mark.gpu)]


def many(num: int) -> list[AdmitRequest]:
    return [request(f"many {n}", prompt(n, 5 + n % 40), max_tokens=8 + n % 20) for n in range(num)]


def assert_same_bits(run: Served, alone: Served) -> None:
    assert run.outputs[KEY] == alone.outputs[KEY]
    assert run.top_logprobs[KEY] == alone.top_logprobs[KEY]


@pytest.mark.parametrize(("device", "num_others"), DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_request_gets_the_same_bits_however_it_is_served(
    temperature: float, dtype: str, device: str, num_others: int
) -> None:
    one = the_one(temperature=temperature, logprobs=5)
    settings: dict[str, Any] = {"device": device, "dtype": dtype}
    roomy = {"max_rows": 1 + num_others, "num_pages": 40 * num_others, **settings}
    alone = served([one], **settings)
    assert_same_bits(served([one], **settings), alone)
    assert_same_bits(served([*many(num_others), one], **roomy), alone)
    assert_same_bits(served([*others(3), one], max_batched_tokens=16, **settings), alone)
    growing = [request(f"growing {n}", prompt(n, 5), max_tokens=60) for n in range(2)]
    cramped = served([*growing, one], num_pages=46, **settings)
    assert cramped.num_retracted > 0
    assert_same_bits(cramped, alone)


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_captured_step_gives_the_bits_of_an_eager_one(temperature: float) -> None:
    """Without alternatives, for which no step is captured."""
    one = request(NAME, prompt(0, 100), max_tokens=40, temperature=temperature)
    settings: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16"}
    eager = served([one, *others(3)], graph_rows=0, **settings)
    for num_others in (0, 3, 7):
        run = served([*others(num_others), one], **settings)
        assert run.outputs[KEY] == eager.outputs[KEY]
