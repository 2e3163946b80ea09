"""`--deterministic`: a request's tokens and logprobs are the same bits alone, among others, in
chunks, after retraction, behind a cached prefix, computed again, and with graphs or without.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest

from aserve.gpu.attention.registry import BACKENDS
from aserve.gpu.build import BuildOptions, build_executor, build_on
from aserve.gpu.device.base import Device
from aserve.gpu.device.registry import open_device
from aserve.messages.requests import AdmitRequest
from aserve.tiny import MODEL_DIR
from tests.fakes import torch_device
from tests.fakes.torch_device import TorchDevice
from tests.gpu.drive import Served, captured, request, serve
from tools.gpu_check.watch import watched

pytestmark = pytest.mark.slow  # a real model, one token at a time

NAME = "the one"
KEY = (NAME, 0)
VOCAB = 1000
THE_PROMPT_LEN = 276
PLENTY: dict[str, Any] = {"max_rows": 12, "max_batched_tokens": 512, "num_pages": 400}


def prompt(seed: int, num_tokens: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, VOCAB) for _ in range(num_tokens)]


def the_one(num_tokens: int = THE_PROMPT_LEN, **sampling: Any) -> AdmitRequest:
    return request(NAME, prompt(0, num_tokens), max_tokens=12, **sampling)


def others(num: int) -> list[AdmitRequest]:
    """Every third is drawn from few tokens."""
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.8, "top_k": 7, "top_p": 0.9}, {}]
    return [
        request(
            f"other {i}",
            prompt(1 + i, 5 + 13 * i % 117),
            max_tokens=6 + 5 * i % 20,
            **kinds[i % len(kinds)],
        )
        for i in range(num)
    ]


def growing() -> list[AdmitRequest]:
    """Two that come first, and need ever more pages."""
    return [request(f"growing {i}", prompt(i, 5), max_tokens=60) for i in range(2)]


def served(requests: list[AdmitRequest], **options: Any) -> Served:
    settings = {"page_size": 8, "debug_checks": True, "prefix_cache": False, **PLENTY, **options}
    executor = build_executor(BuildOptions(MODEL_DIR, deterministic=True, **settings))
    return serve(executor, requests)


DEVICES = [("cpu", 5), pytest.param("cuda", 255, marks=pytest.mark.gpu)]


@pytest.mark.parametrize(("device", "num_others"), DEVICES)
@pytest.mark.parametrize(("dtype", "temperature"), [("float32", 0.9), ("bfloat16", 0.0)])
def test_b34_a_request_gets_the_same_bits_in_whatever_steps_it_is_computed(
    temperature: float, dtype: str, device: str, num_others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Prompts are of more elements than are compiled for, as they are with larger models.
    monkeypatch.setattr("aserve.gpu.device.cpu.ops.FEW_ELEMENTS", 1024)
    machine: dict[str, Any] = {"dtype": dtype, "device": device}
    roomy = {"max_rows": 1 + num_others, "num_pages": 40 * num_others, **machine}
    one = the_one(temperature=temperature, logprobs=5)
    alone = served([one], **machine)
    among = served([*others(4), one, *others(num_others)[4:]], **roomy)
    chunked = served([*others(3), one], max_batched_tokens=16, **machine)
    cramped = served([*growing(), one], num_pages=40, **machine)
    assert cramped.num_retracted > 0
    twin = request("twin", prompt(0, THE_PROMPT_LEN), max_tokens=1)
    cached = served([twin, one], prefix_cache=True, **machine)
    assert cached.num_cached > 0
    for run in (among, chunked, cramped, cached):
        assert run.outputs[KEY] == alone.outputs[KEY]
        assert run.top_logprobs[KEY] == alone.top_logprobs[KEY]


def served_on(device: Device, dtype: str, requests: list[AdmitRequest], **options: Any) -> Served:
    """After all graphs of up to `graph_rows` rows were captured."""
    settings = {**PLENTY, "page_size": 8, "max_model_len": 128, "prefix_cache": False, **options}
    build = BuildOptions(MODEL_DIR, dtype=dtype, deterministic=True, debug_checks=True, **settings)
    return serve(captured(build_on(device, build)), requests)


@pytest.mark.parametrize(
    ("name", "dtype", "temperature"),
    [
        ("recorded", "bfloat16", 0.9),
        pytest.param("cuda", "float32", 0.9, marks=pytest.mark.gpu),
        pytest.param("cuda", "bfloat16", 0.0, marks=pytest.mark.gpu),
    ],
)
def test_a_request_gets_the_same_bits_with_graphs_and_without(
    name: str, dtype: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a step that tells of alternatives there is no graph: what they are told of is KV that
    graphs have written."""
    monkeypatch.setitem(BACKENDS, torch_device.ATTENTION, lambda: torch_device.KIND)
    device, watch = watched(TorchDevice() if name == "recorded" else open_device(name))
    eager = functools.partial(served_on, device, dtype, graph_rows=0)
    replaying = functools.partial(served_on, device, dtype, graph_rows=4)
    one = the_one(40, temperature=temperature)
    expected = eager([one]).outputs[KEY]
    after = request("after", [*prompt(0, 40), *expected], max_tokens=3, logprobs=5)
    told = eager([after]).top_logprobs["after", 0]
    assert watch.num_replays == 0
    among = replaying([*others(3), one, *others(5)[3:]])  # more than any graph has
    chunked = replaying([*others(2), one], max_batched_tokens=16)  # three rows, and later fewer
    cramped = replaying([*growing(), one], num_pages=16)
    assert cramped.num_retracted > 0
    cached = replaying([one, after], max_rows=1, prefix_cache=True)
    assert cached.num_cached > 40
    assert cached.top_logprobs["after", 0] == told
    for run in (among, chunked, cramped, cached):
        assert run.outputs[KEY] == expected
    assert watch.num_replays > 100
