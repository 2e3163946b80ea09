"""`--deterministic`: a request's tokens and logits are the same bits alone, among others, in
chunks, after retraction and behind a cached prefix."""

from __future__ import annotations

import random
from typing import Any

import pytest

from aserve.gpu.attention.paged_cpu import LONG
from aserve.gpu.build import BuildOptions, build_executor
from aserve.messages import AdmitRequest
from aserve.tiny.location import MODEL_DIR
from tests.gpu.drive import Served, request, serve

pytestmark = pytest.mark.slow  # a real model, one token at a time

NAME = "the one"
VOCAB = 1000
PLENTY: dict[str, Any] = {"max_rows": 12, "max_batched_tokens": 512, "num_pages": 400}


def prompt(seed: int, num_tokens: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, VOCAB) for _ in range(num_tokens)]


THE_PROMPT = prompt(0, LONG + 20)


def the_one(**sampling: Any) -> AdmitRequest:
    return request(NAME, THE_PROMPT, max_tokens=24, **sampling)


def others(num: int) -> list[AdmitRequest]:
    return [
        request(f"other {i}", prompt(1 + i, 5 + 13 * i), max_tokens=6 + 5 * i) for i in range(num)
    ]


def served(requests: list[AdmitRequest], **options: Any) -> Served:
    settings = {"page_size": 8, "debug_checks": True, "prefix_cache": False, **PLENTY, **options}
    executor = build_executor(BuildOptions(MODEL_DIR, deterministic=True, **settings))
    return serve(executor, requests)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_request_gets_the_same_bits_in_whatever_steps_it_is_computed(
    temperature: float, dtype: str, device: str
) -> None:
    key = (NAME, 0)
    machine = {"dtype": dtype, "device": device}
    one = the_one(temperature=temperature, logprobs=5)
    alone = served([one], **machine)
    among = served([*others(4), one, *others(8)[4:]], **machine)
    chunked = served([*others(3), one], max_batched_tokens=16, **machine)
    growing = [request(f"growing {i}", prompt(i, 5), max_tokens=60) for i in range(2)]
    cramped = served([*growing, one], num_pages=46, **machine)
    assert cramped.num_retracted > 0
    twin = request("twin", THE_PROMPT, max_tokens=1)
    cached = served([twin, one], prefix_cache=True, **machine)
    assert cached.num_cached > 0
    for run in (among, chunked, cramped, cached):
        assert run.outputs[key] == alone.outputs[key]
        assert run.top_logprobs[key] == alone.top_logprobs[key]


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_captured_step_gives_the_tokens_of_one_that_is_not(temperature: float) -> None:
    requests = [*others(4), the_one(temperature=temperature)]
    captured = served(requests, device="cuda", graph_rows=8)
    assert captured.outputs == served(requests, device="cuda", graph_rows=0).outputs
