"""A device that answers in order and counts its steps: who got how many tokens, and when."""

from __future__ import annotations

from collections import Counter, deque

from aserve.messages.base import array_i32
from aserve.messages.executor import SchedulerEffect, SchedulerEvent
from aserve.messages.output import Refused, Retired, StepOutput
from aserve.messages.requests import AdmitRequest
from aserve.messages.step import Launch, ScheduleBatch
from aserve.scheduling.scheduler import Scheduler
from tests.scheduling.stage import result

TOKEN = 9


class StepCounter:
    """`first_steps` is the number of results that came before a request's first token;
    `num_outputs` counts a client's tokens.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.num_steps = 0
        self.first_steps: dict[str, int] = {}
        self.num_outputs: Counter[str] = Counter()
        self.ends: dict[str, list[Refused | Retired]] = {}
        self.ticks: list[list[ScheduleBatch]] = []  # what each turn of the scheduler launched
        self.num_finished: list[int] = []  # in each turn
        self._in_flight: deque[ScheduleBatch] = deque()
        self._clients: dict[str, str] = {}

    @property
    def batches(self) -> list[ScheduleBatch]:
        return [batch for turn in self.ticks for batch in turn]

    def send(self, *requests: AdmitRequest) -> None:
        self._clients.update((request.request_id, request.client) for request in requests)
        self.play(*requests)

    def run(self, num_steps: int = 100_000) -> None:
        """So many steps, or until nothing is in flight."""
        for _ in range(num_steps):
            while not self._in_flight and self.scheduler.has_more:
                self.play()
            if not self._in_flight:
                return
            batch = self._in_flight.popleft()
            self.num_steps += 1
            sampled = {row: [TOKEN] for row in array_i32(batch.sample_rows).tolist()}
            self.play(result(batch.iteration, sampled))

    def steps_to_first(self, *requests: AdmitRequest) -> list[int]:
        """Sends the requests, and runs until each has its first token."""
        start = self.num_steps
        self.send(*requests)
        while any(request.request_id not in self.first_steps for request in requests):
            before = self.num_steps
            self.run(1)
            assert self.num_steps > before, "nobody moves"
        return [self.first_steps[request.request_id] - start for request in requests]

    def play(self, *events: SchedulerEvent) -> list[SchedulerEffect]:
        effects = self.scheduler.step(list(events))
        self.ticks.append([])
        self.num_finished.append(sum(isinstance(effect, Retired) for effect in effects))
        for effect in effects:
            match effect:
                case Launch(batches=(batch,)):
                    self._in_flight.append(batch)
                    self.ticks[-1].append(batch)
                case StepOutput():
                    for output in effect.outputs():
                        self.first_steps.setdefault(output.request_id, self.num_steps)
                        client = self._clients[output.request_id]
                        self.num_outputs[client] += len(output.token_ids) // 4
                case Refused() | Retired():
                    self.ends.setdefault(effect.request_id, []).append(effect)
                case _:
                    pass
        return effects
