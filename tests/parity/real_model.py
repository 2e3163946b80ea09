"""The bundled model behind the whole engine: what is asked of it, and engines that are disturbed.

In float64 the shape of a batch moves a logit by 1e-15 or so, which never changes an argmax: tokens
can be compared as they are, whatever ran beside them. What the model says is of no importance.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from aserve.config import Facts, Raw, Resolved, resolve
from aserve.engine import Engine
from aserve.gpu.executor import TorchExecutor
from aserve.gpu.runner import ModelRunner
from aserve.gpu.step.plan import StepPlan
from aserve.gpu.step.results import Packed
from aserve.gpu.transfer.staging import DeviceArrays
from aserve.load import Loaded, load
from aserve.messages.base import array_i32
from aserve.messages.step import ScheduleBatch
from aserve.text.load import load_tokenizer
from aserve.tiny import MODEL_DIR
from tests.engine_device import engine_device
from tests.fakes.packed_channel import PackedEngine

NUM_TOKENS = 32
STORY = (
    "Once upon a time there was a small fox named Sam. Sam lived near a lake with his friend Mia. "
    "One day they found a red boat. fox=3729\nMia said: can we sail to the other side? "
)
PLAIN: dict[str, Any] = {"overlap_depth": 1, "overlap_lead": 1, "no_prefix_cache": True}

Tokens = tuple[int, ...]


class Ask(NamedTuple):
    prompt: tuple[int, ...]
    temperature: float = 0.0
    seed: int = 1
    max_tokens: int = NUM_TOKENS

    def fields(self) -> dict[str, Any]:
        return {
            "temperature": self.temperature,
            "seed": self.seed,
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
        }


def token_ids(text: str) -> tuple[int, ...]:
    return tuple(load_tokenizer(MODEL_DIR).encode(text, with_special=False))


def asks() -> list[Ask]:
    """Short, 200 tokens and a shared prefix, each greedy and at temperature 0.8, and 16
    neighbours: 24 requests.
    """
    story = token_ids(STORY * 5)
    prompts = [token_ids("Once upon a time"), story[:200], story[:130] + story[7:30], story[:135]]
    watched = [Ask(prompt, temperature) for prompt in prompts for temperature in (0.0, 0.8)]
    neighbours = [
        Ask(story[start : start + 3 + 5 * start], 0.8, seed=start, max_tokens=10 + start)
        for start in range(16)
    ]
    return watched + neighbours


def options(**changed: Any) -> Resolved:
    given = {"dtype": "float64", "debug_checks": True, "num_pages": 200, "device": engine_device()}
    given |= changed
    return resolve(Raw(command_line=given), Facts(default_model=str(MODEL_DIR)))


def engine(loader: Callable[[Resolved], Loaded] = load, **changed: Any) -> Engine:
    """Every message passes msgpack, and every invariant is checked in every step."""
    return PackedEngine(options(**changed), loader=loader)


async def tokens_of(running: Engine, ask: Ask) -> Tokens:
    answer = await running.answer(ask.prompt, **ask.fields())
    return answer.choices[0].token_ids


async def all_at_once(running: Engine, asked: Sequence[Ask]) -> list[Tokens]:
    return await asyncio.gather(*(tokens_of(running, ask) for ask in asked))


def metric(running: Engine, name: str) -> float:
    value = running._frontend.metrics.registry.get_sample_value(name)
    assert value is not None, name
    return value


Hook = Callable[[ScheduleBatch], None]  # on the executor's thread; may raise or wait


def calm(_: ScheduleBatch) -> None:
    pass


class Failing:
    """A hook that raises in the steps where something is due."""

    def __init__(self, is_due: Callable[[ScheduleBatch], bool]) -> None:
        self._is_due = is_due
        self.raised: list[int] = []  # iterations

    def __call__(self, batch: ScheduleBatch) -> None:
        if self._is_due(batch):
            self.raised.append(batch.iteration)
            raise RuntimeError("injected")


def failing_in(*iterations: int) -> Failing:
    return Failing(lambda batch: batch.iteration in iterations)


def failing_with(token_id: int) -> Failing:
    """In steps that compute this token: a request that kills each step that it is in."""
    return Failing(lambda batch: token_id in array_i32(batch.input_ids))


class Disturbed:
    """A loader whose executor calls hooks on its own thread: `before` any work of a step, and
    `after` all of it, when only its result is missing.
    """

    def __init__(self, *, before: Hook = calm, after: Hook = calm) -> None:
        self._before = before
        self._after = after

    def __call__(self, resolved: Resolved) -> Loaded:
        loaded = load(resolved)
        executor = loaded.executor
        assert isinstance(executor, TorchExecutor)
        runner = HookedRunner(executor._runner, self._before, self._after)
        executor._runner = runner  # type: ignore[assignment]  # it has all that a runner has
        return loaded


class HookedRunner:
    def __init__(self, runner: ModelRunner, before: Hook, after: Hook) -> None:
        self._runner = runner
        self._before = before
        self._after = after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def apply(self, batch: ScheduleBatch, tables: DeviceArrays) -> None:
        self._before(batch)
        self._runner.apply(batch, tables)

    def step(self, plan: StepPlan, *arguments: Any) -> Packed:
        packed = self._runner.step(plan, *arguments)
        self._after(plan.batch)
        return packed
