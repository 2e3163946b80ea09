"""Times batches of prompts and derives TTFT, prefill and decode rates.

T1 is the wall time of a batch of B prompts with one output token each, and Tn with n output tokens.
TTFT = T1, decode tok/s = B (n - 1) / (Tn - T1), out tok/s = B n / Tn.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from aserve.bench.cpu_time import ForeignCpu
from aserve.bench.result import median, spread
from aserve.errors import BugError

# Generates a number of tokens for each of several prompts of one length, and returns the total.
Generate = Callable[[Sequence[list[int]], int], Awaitable[int]]
WARM_UP_LEN = 8


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    num_prompts: int
    input_len: int
    output_len: int

    @property
    def lengths(self) -> tuple[int, ...]:
        """The output lengths that each repeat times: 1 and n."""
        return (1, self.output_len) if self.output_len > 1 else (1,)


PEERS = (
    Scenario("b1", 1, 128, 128),
    Scenario("b8", 8, 128, 64),
    Scenario("b32", 32, 128, 64),
    Scenario("prefill", 1, 2048, 1),
)


@dataclass(slots=True)
class BatchTimes:
    """One engine's times in one scenario, by number of new tokens."""

    scenario: Scenario
    seconds: dict[int, list[float]] = field(default_factory=dict)
    foreign: list[float] = field(default_factory=list)  # CPU share of other processes, by run

    async def add(self, generate: Generate, prompts: Sequence[list[int]], num_new: int) -> None:
        foreign = ForeignCpu()
        start_s = time.perf_counter()
        num_tokens = await generate(prompts, num_new)
        took_s = time.perf_counter() - start_s
        if num_tokens != len(prompts) * num_new:
            expected = f"{len(prompts)} x {num_new}"
            raise BugError(f"{self.scenario.name}: got {num_tokens} tokens instead of {expected}")
        self.seconds.setdefault(num_new, []).append(took_s)
        self.foreign.append(foreign.share())

    def figures(self) -> dict[str, float]:
        scenario = self.scenario
        ttft_s = median(self.seconds[1])
        figures = {
            "ttft_ms": ttft_s * 1e3,
            "prefill_tok_s": scenario.num_prompts * scenario.input_len / ttft_s,
        }
        num_new = scenario.output_len
        if num_new > 1:
            all_s = median(self.seconds[num_new])
            step_s = (all_s - ttft_s) / (num_new - 1)
            figures |= {
                "decode_ms_per_step": step_s * 1e3,
                "decode_tok_s": scenario.num_prompts / step_s,
                "out_tok_s": scenario.num_prompts * num_new / all_s,
            }
        figures |= {"spread": spread(self.seconds[num_new]), "foreign_cpu": max(self.foreign)}
        return {name: round(value, 3) for name, value in figures.items()}
