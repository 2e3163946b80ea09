"""A device that answers in order and counts its steps: who got how many tokens, and when."""

from __future__ import annotations

from collections import Counter, deque

from aserve.messages.base import array_i32
from aserve.messages.executor import SchedulerEvent
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
        self.batches: list[ScheduleBatch] = []
        self._in_flight: deque[ScheduleBatch] = deque()
        self._clients: dict[str, str] = {}

    def send(self, *requests: AdmitRequest) -> None:
        self._clients.update((request.request_id, request.client) for request in requests)
        self._play(*requests)

    def run(self, num_steps: int = 100_000) -> None:
        """So many steps, or until nothing is in flight."""
        for _ in range(num_steps):
            if not self._in_flight:
                return
            batch = self._in_flight.popleft()
            self.num_steps += 1
            sampled = {row: [TOKEN] for row in array_i32(batch.sample_rows).tolist()}
            self._play(result(batch.iteration, sampled))

    def steps_to_first(self, *requests: AdmitRequest) -> list[int]:
        """Sends the requests, and runs until each has its first token."""
        start = self.num_steps
        self.send(*requests)
        while any(request.request_id not in self.first_steps for request in requests):
            before = self.num_steps
            self.run(1)
            assert self.num_steps > before, "nobody moves"
        return [self.first_steps[request.request_id] - start for request in requests]

    def _play(self, *events: SchedulerEvent) -> None:
        for effect in self.scheduler.step(list(events)):
            match effect:
                case Launch(batches=(batch,)):
                    self._in_flight.append(batch)
                    self.batches.append(batch)
                case StepOutput(sequences=outputs):
                    for output in outputs:
                        self.first_steps.setdefault(output.request_id, self.num_steps)
                        client = self._clients[output.request_id]
                        self.num_outputs[client] += len(output.token_ids) // 4
                case Refused() | Retired():
                    self.ends.setdefault(effect.request_id, []).append(effect)
                case _:
                    pass
