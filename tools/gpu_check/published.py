"""Measures the load in the READMEs of nano-vllm and mini-sglang: 256 requests at once, whose
prompts and outputs have random lengths of 100 to 1,024 tokens. The result is output tokens per
second.
"""

from __future__ import annotations

import asyncio
import functools
import random

from aserve.bench.batch_times import WARM_UP_LEN
from aserve.bench.compared_engines import time_request
from aserve.bench.load import run_load
from aserve.bench.result import median, spread
from aserve.config import Resolved
from aserve.engine import Engine
from aserve.host.threads import new_event_loop
from aserve.load import load
from tools.gpu_check.records import Figures
from tools.gpu_check.setting import Setting, resolved_of

MOST_ID = 10_000
TEMPERATURE = 0.6
Request = tuple[list[int], int]  # prompt ids and number of output tokens


def measure(setting: Setting, _argument: str) -> Figures:
    sizes = setting.sizes
    num_requests, shortest, longest = sizes.published
    requests = draw_load(num_requests, shortest=shortest, longest=longest, vocab=sizes.small.vocab)
    flags = setting.flags(sizes.small, num_rows=num_requests, max_len=2 * longest)
    times_s = _times_s(requests, resolved_of(flags), repeats=sizes.repeats)
    num_outputs = sum(num_new for _, num_new in requests)
    return {
        "output_tok_s": round(num_outputs / median(times_s), 1),
        "seconds": round(median(times_s), 3),
        "spread": round(spread(times_s), 3),
        "input_tokens": sum(len(prompt) for prompt, _ in requests),
        "output_tokens": num_outputs,
    }


def draw_load(num_requests: int, *, shortest: int, longest: int, vocab: int) -> list[Request]:
    """Draws the requests with seed 0 and in the order of those benches: all prompts, then all
    output lengths. So 256 requests of 100 to 1,024 tokens have the same 133,966 output tokens.
    """
    numbers = random.Random(0)
    last_id = min(MOST_ID, vocab - 1)
    prompts = []
    for _ in range(num_requests):
        length = numbers.randint(shortest, longest)
        prompts.append([numbers.randint(0, last_id) for _ in range(length)])
    return [(prompt, numbers.randint(shortest, longest)) for prompt in prompts]


def _times_s(requests: list[Request], resolved: Resolved, *, repeats: int) -> list[float]:
    """Returns the seconds of each run of the whole load, without the first."""
    loaded = load(resolved)

    async def run() -> list[float]:
        async with Engine(resolved, loader=lambda _: loaded) as engine:
            await time_request(engine, requests[0][0], max_tokens=WARM_UP_LEN)
            asks = [
                functools.partial(
                    time_request, engine, prompt, max_tokens=num_new, temperature=TEMPERATURE
                )
                for prompt, num_new in requests
            ]
            arrivals_s, most = [0.0] * len(asks), len(asks)
            runs = [
                await run_load(asks, arrivals_s, max_concurrency=most, done=lambda: None)
                for _ in range(1 + repeats)
            ]
        return [took_s for _, took_s in runs[1:]]

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(run())
