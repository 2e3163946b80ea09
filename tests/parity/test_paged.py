"""The whole device side against transformers: executor, pages and sampler around real models."""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from aserve.gpu.build import BuildOptions, assemble
from aserve.gpu.decode.autoregressive import Autoregressive
from aserve.gpu.device.cpu.device import CpuDevice
from aserve.gpu.device.registry import open_device
from aserve.gpu.models.base import CausalModel
from tests.gpu import batch_builder
from tests.gpu.batch_builder import BatchBuilder, tokens_by_row
from tests.load_model import load_model
from tests.parity.conftest import ReferenceOf
from tests.parity.references import KINDS, MAX_MODEL_LEN, NUM_GREEDY, PROMPT_LEN, Reference

pytestmark = pytest.mark.slow  # each reference takes a moment to make

ROW, NEIGHBOUR = 3, 1
CHUNKED = (
    *("llama-dynamic", "llama-longrope", "qwen3-mixed", "mistral", "gemma2", "gemma3-linear"),
    *("phi3-longrope", "olmo2", "starcoder2", "qwen3-next", "qwen3.5", "lfm2"),
)
MIXED = (
    *("llama-yarn", "llama-llama3", "qwen3-sliding", "qwen2-sliding", "gemma2", "gemma3", "phi3"),
    *("granite", "cohere2", "gpt-neox", "qwen3-moe", "qwen3-next", "qwen3.5", "lfm2"),
)
# Not every backend supports latents.
LATENT = [
    ("deepseek3", 1, "paged-cpu"),
    ("deepseek2", 16, "paged-cpu"),
    ("deepseek3", 7, "torch-ref"),
    ("deepseek32", 1, "torch-ref"),
    ("deepseek32", 7, "paged-cpu"),
]
NUM_PAGES = {1: 4 * MAX_MODEL_LEN, 7: 90, 16: 40}
IS_LARGE = os.environ.get("ASERVE_TEST_PROFILE") == "large"


def cases(kinds: Sequence[str]) -> list[tuple[str, int, str]]:
    """Each kind in each backend; page sizes in turns, or all of them in the large profile."""
    turns = itertools.count()
    return [
        (kind, page_size, backend)
        for kind in kinds
        for backend in CpuDevice().attention
        for page_size in (NUM_PAGES if IS_LARGE else [list(NUM_PAGES)[next(turns) % 3]])
    ]


class Recorder:
    """A model that also keeps the logits of every token of every forward, in order."""

    def __init__(self, model: CausalModel) -> None:
        self.model = model
        self.recorded: list[Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, *arguments: Any, **options: Any) -> Tensor:
        hidden = self.model.forward(*arguments, **options)
        self.recorded.append(self.model.logits(hidden))
        return hidden


@asynccontextmanager
async def running(
    reference: Reference, **options: Any
) -> AsyncIterator[tuple[BatchBuilder, list[Tensor]]]:
    """An executor around the model, and the logits of its steps: one [tokens, vocab] per step."""
    page_size = options.setdefault("page_size", 16)
    build = BuildOptions(
        reference.directory,
        num_pages=NUM_PAGES[page_size],
        max_rows=4,
        max_batched_tokens=PROMPT_LEN + 4,
        debug_checks=True,
        **options,
    )
    recorder = Recorder(load_model(reference.directory, max_model_len=MAX_MODEL_LEN))
    model: Any = recorder  # it has all that a model has
    executor = assemble(model, Autoregressive(), open_device("cpu"), build)
    async with batch_builder.running(executor) as run:
        yield run, recorder.recorded


async def decode(run: BatchBuilder, *, num_steps: int) -> list[int]:
    """Each step is launched before the result of the one before it is known."""
    tickets = [run.launch({ROW: [-ROW]}, sampling=[ROW]) for _ in range(num_steps)]
    return [tokens_by_row(await ticket)[ROW] for ticket in tickets]


def ids_of(tokens: Tensor) -> list[int]:
    return [int(token) for token in tokens]


def assert_close(logits: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0.0)


@pytest.mark.parametrize(
    ("kind", "page_size"), [(kind, (1, 16)[number % 2]) for number, kind in enumerate(KINDS)]
)
async def test_prefill_and_greedy_decode_equal_transformers(
    kind: str, page_size: int, reference_of: ReferenceOf
) -> None:
    reference = reference_of(kind)
    async with running(reference, page_size=page_size) as (run, steps):
        first = await run.launch({ROW: ids_of(reference.prompt)}, sampling=[ROW])
        tokens = [tokens_by_row(first)[ROW], *await decode(run, num_steps=NUM_GREEDY - 1)]
    assert_close(torch.cat(steps), reference.logits)
    assert tokens == ids_of(reference.greedy)


@pytest.mark.parametrize(("kind", "page_size", "backend"), [*cases(CHUNKED), *LATENT])
async def test_chunked_prefill_equals_transformers(
    kind: str, page_size: int, backend: str, reference_of: ReferenceOf
) -> None:
    reference = reference_of(kind)
    chunks = reference.prompt.split([1, 16, 15, 1, 30, 7])
    async with running(reference, page_size=page_size, attention=backend) as (run, steps):
        tickets = [
            run.launch({ROW: ids_of(chunk)}, sampling=[ROW] if chunk is chunks[-1] else [])
            for chunk in chunks
        ]
        first = tokens_by_row([await ticket for ticket in tickets][-1])[ROW]
        tokens = [first, *await decode(run, num_steps=20)]
    assert_close(torch.cat(steps), reference.logits[: PROMPT_LEN + 20])
    assert tokens == ids_of(reference.greedy[:21])


@pytest.mark.parametrize(("kind", "page_size", "backend"), [*cases(MIXED), *LATENT])
async def test_mixed_steps_equal_transformers(
    kind: str, page_size: int, backend: str, reference_of: ReferenceOf
) -> None:
    await check_mixed_steps(reference_of(kind), page_size=page_size, backend=backend)


async def test_mixed_steps_in_our_kernels_equal_transformers(reference_of: ReferenceOf) -> None:
    """Through Triton's interpreter; this family has windows and caps."""
    await check_mixed_steps(reference_of("gemma2"), page_size=7, backend="triton")


async def check_mixed_steps(reference: Reference, *, page_size: int, backend: str) -> None:
    """A neighbour's prompt comes in chunks while the row decodes: both as if they were alone."""
    chunks = reference.neighbour.split([9, 1, 22, 1, 37])
    async with running(reference, page_size=page_size, attention=backend) as (run, steps):
        tickets = [run.launch({ROW: ids_of(reference.prompt)}, sampling=[ROW])]
        for number, chunk in enumerate(chunks):
            query_lens = {ROW: [-ROW], NEIGHBOUR: ids_of(chunk)}
            order = query_lens if number % 2 else dict(reversed(query_lens.items()))
            tickets.append(run.launch(order, sampling=[ROW]))
        tokens = [tokens_by_row(await ticket)[ROW] for ticket in tickets]
    mixed = steps[1:]
    rows = [step[:1] if number % 2 else step[-1:] for number, step in enumerate(mixed)]
    neighbours = [step[1:] if number % 2 else step[:-1] for number, step in enumerate(mixed)]
    assert_close(torch.cat((steps[0], *rows)), reference.logits[: PROMPT_LEN + len(chunks)])
    assert_close(torch.cat(neighbours), reference.neighbour_logits)
    assert tokens == ids_of(reference.greedy[: len(tokens)])


async def test_a_lost_page_turns_parity_red(reference_of: ReferenceOf) -> None:
    """The comparison sees one token's KV: here the page of an earlier token is another's."""
    reference = reference_of("llama")
    async with running(reference, page_size=1) as (run, steps):
        await run.launch({ROW: ids_of(reference.prompt)}, sampling=[ROW])
        run.kv_lens[ROW] -= 10
        run.groups[0].free.append(run.groups[0].held[ROW][PROMPT_LEN - 30])
        await run.launch({ROW: ids_of(reference.prompt[-10:])}, sampling=[ROW])
    differences = (steps[1] - reference.logits[PROMPT_LEN - 10 : PROMPT_LEN]).abs()
    assert differences.max() > 1e-2
