"""`--deterministic`: a request's tokens and logprobs are the same bits alone, among others, in
chunks, after retraction, behind a cached prefix, computed again, and with graphs or without.
"""

from __future__ import annotations

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
from tests.gpu.drive import Served, request, serve
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
    return request(NAME, prompt(0, num_tokens), max_tokens=24, **sampling)


def others(num: int) -> list[AdmitRequest]:
    """Every third is drawn from few tokens."""
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.8, "top_k": 7, "top_p": 0.9}, {}]
    return [
        request(
            f"other {i}",
            prompt(1 + i, 5 + 13 * i % 117),
            max_tokens=6 + 5 * i % 40,
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


DEVICES = [("cpu", 8), pytest.param("cuda", 255, marks=pytest.mark.gpu)]


@pytest.mark.parametrize(("device", "num_others"), DEVICES)
@pytest.mark.parametrize(("dtype", "temperature"), [("float32", 0.9), ("bfloat16", 0.0)])
def test_a_request_gets_the_same_bits_in_whatever_steps_it_is_computed(
    temperature: float, dtype: str, device: str, num_others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Prompts are of more elements than are compiled for, as they are with larger models.
    monkeypatch.setattr("aserve.gpu.device.cpu.ops.FEW_ELEMENTS", 1024)
    monkeypatch.setattr("aserve.gpu.device.cpu.ops.FEW_ELEMENTS", 1024)
    machine: dict[str, Any] = {"dtype": dtype, "device": device}
    roomy = {"max_rows": 1 + num_others, "num_pages": 40 * num_others, **machine}
    one = the_one(temperature=temperature, logprobs=5)
    alone = served([one], **machine)
    again = served([one], **machine)
    among = served([*others(4), one, *others(num_others)[4:]], **roomy)
    chunked = served([*others(3), one], max_batched_tokens=16, **machine)
    cramped = served([*growing(), one], num_pages=46, **machine)
    assert cramped.num_retracted > 0
    twin = request("twin", prompt(0, THE_PROMPT_LEN), max_tokens=1)
    cached = served([twin, one], prefix_cache=True, **machine)
    assert cached.num_cached > 0
    for run in (again, among, chunked, cramped, cached):
        assert run.outputs[KEY] == alone.outputs[KEY]
        assert run.top_logprobs[KEY] == alone.top_logprobs[KEY]


class Machine:
    """Of a device that captures; with all graphs of up to `graph_rows` rows."""

    def __init__(self, device: Device, dtype: str, *, graph_rows: int) -> None:
        self._device, self._watch = watched(device)
        self._dtype = dtype
        self._graph_rows = graph_rows

    @property
    def num_replays(self) -> int:
        return self._watch.num_replays

    def served(self, requests: list[AdmitRequest], **options: Any) -> Served:
        settings = {**PLENTY, "page_size": 8, "max_model_len": 128, "prefix_cache": False}
        build = BuildOptions(
            MODEL_DIR,
            dtype=self._dtype,
            graph_rows=self._graph_rows,
            deterministic=True,
            debug_checks=True,
            **{**settings, **options},
        )
        executor = build_on(self._device, build)
        executor.capture_graphs(lambda _done, _total: None)
        return serve(executor, requests)


def machine(name: str, dtype: str, *, graph_rows: int) -> Machine:
    device = TorchDevice() if name == "recorded" else open_device(name)
    return Machine(device, dtype, graph_rows=graph_rows)


@pytest.mark.parametrize("device", ["recorded", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("dtype", "temperature"), [("float32", 0.9), ("bfloat16", 0.0)])
def test_a_request_gets_the_same_bits_with_graphs_and_without(
    dtype: str, temperature: float, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a step that tells of alternatives there is no graph: what they are told of is KV that
    graphs have written."""
    monkeypatch.setitem(BACKENDS, torch_device.ATTENTION, lambda: torch_device.KIND)
    one = the_one(40, temperature=temperature)
    eager = machine(device, dtype, graph_rows=0)
    expected = eager.served([one]).outputs[KEY]
    after = request("after", [*prompt(0, 40), *expected], max_tokens=3, logprobs=5)
    told = eager.served([after]).top_logprobs["after", 0]
    replaying = machine(device, dtype, graph_rows=4)
    of_both: list[list[Served]] = []
    for way in (eager, replaying):
        alone = way.served([one])
        padded = way.served([one, *others(2)])  # three rows, and later fewer
        among = way.served([*others(3), one, *others(7)[3:]])  # more than any graph has
        chunked = way.served([*others(2), one], max_batched_tokens=16)
        cramped = way.served([*growing(), one], num_pages=16)
        assert cramped.num_retracted > 0
        cached = way.served([one, after], max_rows=1, prefix_cache=True)
        assert cached.num_cached > 40
        assert cached.top_logprobs["after", 0] == told
        of_both.append([alone, padded, among, chunked, cramped, cached])
    assert eager.num_replays == 0
    assert replaying.num_replays > 100
    for of_eager, of_replaying in zip(*of_both, strict=True):
        assert of_replaying.outputs == of_eager.outputs
        assert of_replaying.outputs[KEY] == expected
