"""`--deterministic` on the CPU: a request's tokens and logits are the same bits, whatever else the
engine does meanwhile and in whichever steps they are computed."""

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


def the_one(**sampling: Any) -> AdmitRequest:
    return request(NAME, prompt(0, LONG + 20), max_tokens=24, logprobs=5, **sampling)


def others(num: int) -> list[AdmitRequest]:
    return [
        request(f"other {i}", prompt(1 + i, 5 + 13 * i), max_tokens=6 + 5 * i) for i in range(num)
    ]


def served(requests: list[AdmitRequest], **options: Any) -> Served:
    settings = {"page_size": 8, "debug_checks": True, "prefix_cache": False, **PLENTY, **options}
    executor = build_executor(BuildOptions(MODEL_DIR, deterministic=True, **settings))
    return serve(executor, requests)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_request_gets_the_same_bits_alone_among_others_in_chunks_and_computed_again(
    temperature: float, dtype: str
) -> None:
    key = (NAME, 0)
    one = the_one(temperature=temperature)
    alone = served([one], dtype=dtype)
    among = served([*others(4), one, *others(8)[4:]], dtype=dtype)
    chunked = served([*others(3), one], dtype=dtype, max_batched_tokens=16)
    growing = [request(f"growing {i}", prompt(i, 5), max_tokens=60) for i in range(2)]
    cramped = served([*growing, one], dtype=dtype, num_pages=46)
    assert cramped.num_retracted > 0
    for run in (among, chunked, cramped):
        assert run.outputs[key] == alone.outputs[key]
        assert run.top_logprobs[key] == alone.top_logprobs[key]
