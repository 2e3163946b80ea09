"""Counts what each kind of step asks of torch and of CUDA, with graphs and without: the table of
docs/performance.md. `python -m tests.gpu.step_calls` prints it.

The device is simulated (tests/fakes/cuda.py), and the model is a Qwen3 decoder with few elements,
in float64. So each operator is one of plain torch; on a GPU Triton kernels take the places of
several of them, and eager steps have fewer calls. Two numbers of layers give the calls per layer.
"""

from __future__ import annotations

import asyncio
import functools
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from aserve.gpu.executor import TorchExecutor
from aserve.gpu.models.base import CausalModel
from aserve.gpu.weights.dummy import DummyWeights
from aserve.gpu.weights.source import Target
from aserve.messages.results import StepResult
from aserve.messages.step import ScheduleBatch
from tests.fakes.cuda import Event, FakeCuda, Graph, Stream
from tests.gpu.batch_builder import BatchBuilder, greedy, running
from tests.gpu.device.cuda.test_device import executor_on, unless_dead
from tests.gpu.drive import captured
from tests.load_model import load_model
from tools.gpu_check.shapes import ModelShape

NUM_LAYERS = (2, 3)
PROMPT = list(range(1, 10))
ASKED = (
    (FakeCuda, ("dispatch", "on", "new_event", "keep")),
    (Event, ("synchronize",)),
    (Stream, ("record_event", "wait_event")),
    (Graph, ("replay",)),
)
NEW = (greedy(3),)

# The kinds of steps. Each comes behind two rows' prompts and two decodes.
BATCHES: dict[str, Callable[[BatchBuilder], ScheduleBatch]] = {
    "2 decodes": lambda builder: builder.batch({1: [-1], 2: [-2]}, sampling=[1, 2]),
    "2 decodes, one waits for a mask": lambda builder: builder.batch(
        {1: [-1], 2: [-2]}, sampling=[1], held=[2]
    ),
    "a prompt of 5 tokens": lambda builder: builder.batch({3: PROMPT[:5]}, sampling=[3], inits=NEW),
    "a chunk of 5 tokens": lambda builder: builder.batch({3: PROMPT[:5]}, sampling=[], inits=NEW),
    "2 decodes and a prompt of 5 tokens": lambda builder: builder.batch(
        {1: [-1], 2: [-2], 3: PROMPT[:5]}, sampling=[1, 2, 3], inits=NEW
    ),
    "a prompt of 9 tokens (above the bound of 8)": lambda builder: builder.batch(
        {3: PROMPT}, sampling=[3], inits=NEW
    ),
}
# Decodes whose rows want more than greedy tokens.
SAMPLINGS: dict[str, dict[str, Any]] = {
    "2 decodes with penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5},
    "2 decodes with logprobs": {"num_logprobs": 3},
    "2 decodes with a logit bias": {"logit_bias": ((5, 2.0),)},
}


@dataclass
class Calls:
    """What the executor's thread asked for while `is_counting`. A replay is one call."""

    is_counting: bool = False
    names: list[str] = field(default_factory=list)

    @contextmanager
    def watched(self) -> Iterator[None]:
        with _patched(self._noting):
            yield

    def _noting(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            if self.is_counting and threading.current_thread().name == "aserve-executor":
                self.names.append(name)
            return real(*args, **kwargs)

        return noted


@contextmanager
def _patched(noting: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    patches = [
        mock.patch.object(owner, name, noting(name, getattr(owner, name)))
        for owner, names in ASKED
        for name in names
    ]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


@dataclass(frozen=True)
class Count:
    """A step's calls, of which so many are replays, and how it ran."""

    num_calls: int
    num_replays: int
    ran: str


def thin_model(folder: Path, cuda: FakeCuda, num_layers: int) -> CausalModel:
    """Its weights are ones: nothing can be drawn on a device that computes later."""

    def drawn(weights: DummyWeights, _name: str, shape: tuple[int, ...]) -> Tensor:
        return torch.ones(shape, device=weights.device, dtype=weights.dtype)

    shape = ModelShape(f"thin-{num_layers}", 8, num_layers, 2, 1, 4, 8, 37, is_tied=True)
    with mock.patch.object(DummyWeights, "_drawn", drawn):
        return load_model(
            shape.write(folder),
            dtype="float64",
            max_model_len=64,
            load_format="dummy",
            target=Target(cuda.torch_device),
        )


def counts(folder: Path, num_layers: int, *, has_graphs: bool) -> dict[str, Count]:
    """Counts every kind of step, on one executor."""
    cuda = FakeCuda()
    executor = executor_on(
        cuda,
        lambda _where: thin_model(folder, cuda, num_layers),
        debug_checks=False,
        graph_rows=2 if has_graphs else 0,
        piece_tokens=8 if has_graphs else None,
        max_rows=3,
    )
    calls = Calls()

    async def run() -> dict[str, Count]:
        async with running(captured(executor)) as builder:
            return {
                name: await count_step(executor, builder, calls, make_batch, sampling)
                for name, (make_batch, sampling) in kinds().items()
            }

    with calls.watched():
        found = asyncio.run(run())
    cuda.assert_sound()
    return found


async def count_step(
    executor: TorchExecutor,
    builder: BatchBuilder,
    calls: Calls,
    make_batch: Callable[[BatchBuilder], ScheduleBatch],
    sampling: dict[str, Any],
) -> Count:
    inits = [greedy(row, **sampling) for row in (1, 2)]
    prompts = {1: PROMPT[:5], 2: PROMPT[:5]}
    batches = [builder.batch(prompts, sampling=[1, 2], inits=inits)]
    batches += [builder.batch({1: [-1], 2: [-2]}, sampling=[1, 2]) for _ in range(2)]
    for batch in batches:
        await unless_dead(executor, executor.launch(batch).outcome)
    calls.names.clear()
    jobs, batch = executor._threads.jobs, make_batch(builder)
    jobs.put(functools.partial(setattr, calls, "is_counting", True))
    ticket = executor.launch(batch)
    jobs.put(functools.partial(setattr, calls, "is_counting", False))
    outcome = await unless_dead(executor, ticket.outcome)
    assert isinstance(outcome, StepResult), outcome
    for row in (1, 2, 3):
        builder.end(row)
    return Count(len(calls.names), calls.names.count("replay"), outcome.ran or "eager")


def kinds() -> dict[str, tuple[Callable[[BatchBuilder], ScheduleBatch], dict[str, Any]]]:
    decode = BATCHES["2 decodes"]
    return {name: (make_batch, {}) for name, make_batch in BATCHES.items()} | {
        name: (decode, sampling) for name, sampling in SAMPLINGS.items()
    }


def table(folder: Path) -> Sequence[str]:
    """The lines of the table in Markdown."""
    few, more = (
        [counts(folder, num_layers, has_graphs=has_graphs) for num_layers in NUM_LAYERS]
        for has_graphs in (True, False)
    )
    lines = ["| step | ran | calls | of these replays | calls without graphs |"]
    lines.append("|---|---|---|---|---|")
    for name in kinds():
        ours, eager = [found[name] for found in few], [found[name] for found in more]
        cells = [
            name,
            ours[0].ran,
            per_layer([each.num_calls for each in ours]),
            per_layer([each.num_replays for each in ours]),
            per_layer([each.num_calls for each in eager]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def per_layer(found: Sequence[int]) -> str:
    slope = found[1] - found[0]
    base = found[0] - slope * NUM_LAYERS[0]
    return f"{base} + {slope} per layer" if slope else f"{base}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print("\n".join(table(Path(folder))))  # noqa: T201
