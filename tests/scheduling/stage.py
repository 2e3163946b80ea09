"""A scheduler on a stage: events in by short names, effects out by type. No device, no clock."""

from __future__ import annotations

from typing import TypeVar

from aserve.messages.base import array_i32, pack_i32
from aserve.messages.executor import (
    DecodeCaps,
    EngineSpec,
    GroupSpec,
    SchedulerEffect,
    SchedulerEvent,
)
from aserve.messages.output import SequenceOutput, StepOutput
from aserve.messages.requests import AdmitRequest, Cancel, Grammar, SamplingParams
from aserve.messages.results import StepResult
from aserve.messages.step import Launch, ScheduleBatch
from aserve.scheduling.scheduler import Scheduler

E = TypeVar("E")


def spec(
    *,
    depth: int = 2,
    lead: int = 2,
    num_pages: int = 33,
    page_size: int = 4,
    max_rows: int = 4,
    max_batched_tokens: int = 64,
    window: int = 1,
) -> EngineSpec:
    return EngineSpec(
        page_size=page_size,
        groups=(GroupSpec("full", num_pages),),
        max_rows=max_rows,
        max_model_len=128,
        max_batched_tokens=max_batched_tokens,
        vocab_size=100,
        depth=depth,
        lead=lead,
        max_waiting=4,
        decode=DecodeCaps(max_tokens_per_step=window),
    )


def request(
    name: str,
    prompt: list[int],
    *,
    max_tokens: int = 8,
    end_ids: tuple[int, ...] = (),
    n: int = 1,
    grammar: Grammar | None = None,
    priority: int = 0,
    client: str = "",
    awaits_kv: bool = False,
    sends_kv: bool = False,
) -> AdmitRequest:
    return AdmitRequest(
        request_id=name,
        prompt_ids=pack_i32(prompt),
        sampling=SamplingParams(seed=1, max_tokens=max_tokens, n=n, grammar=grammar),
        end_ids=end_ids,
        priority=priority,
        client=client,
        awaits_kv=awaits_kv,
        sends_kv=sends_kv,
    )


def result(iteration: int, tokens: dict[int, list[int]]) -> StepResult:
    flat = [token for row in tokens.values() for token in row]
    counts = [len(row) for row in tokens.values()]
    return StepResult(iteration, pack_i32(list(tokens)), pack_i32(counts), pack_i32(flat))


def cancel(name: str) -> Cancel:
    return Cancel(name, None, 0, "cancelled")


class Stage:
    """Keeps what came out of every call of step, so that a test reads as a script."""

    def __init__(self, engine: EngineSpec) -> None:
        self.scheduler = Scheduler(engine, debug_checks=True)
        self.effects: list[SchedulerEffect] = []

    def play(self, *events: SchedulerEvent) -> list[SchedulerEffect]:
        self.effects = self.scheduler.step(list(events))
        return self.effects

    def of(self, kind: type[E]) -> list[E]:
        return [effect for effect in self.effects if isinstance(effect, kind)]

    @property
    def outputs(self) -> list[SequenceOutput]:
        """Of all sequences in the last tick."""
        return [output for step in self.of(StepOutput) for output in step.outputs()]

    @property
    def batches(self) -> list[ScheduleBatch]:
        return [batch for effect in self.of(Launch) for batch in effect.batches]


def ids(batch: ScheduleBatch) -> list[int]:
    return array_i32(batch.input_ids).tolist()


def rows(batch: ScheduleBatch) -> list[int]:
    return array_i32(batch.rows).tolist()


def query_lens(batch: ScheduleBatch) -> list[int]:
    return array_i32(batch.query_lens).tolist()
