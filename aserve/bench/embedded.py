"""One request of the embedded engine, timed like one of a server's client.

It does not know how many others run.
"""

from __future__ import annotations

import time

from aserve.bench.streamed import Answer
from aserve.engine import Engine
from aserve.messages import array_i32


async def ask_engine(
    engine: Engine, prompt: list[int], *, max_tokens: int, temperature: float = 0.0
) -> Answer:
    """Exactly `max_tokens` tokens; the engine's errors are raised."""
    answer = Answer()
    start_s = last_s = time.perf_counter()
    chunks = engine.generate(
        prompt, max_tokens=max_tokens, temperature=temperature, ignore_eos=True
    )
    async for chunk in chunks:
        now_s = time.perf_counter()
        if len(array_i32(chunk.token_ids)):
            if answer.ttft_s is None:
                answer.ttft_s = now_s - start_s
            else:
                answer.itls_s.append(now_s - last_s)
            last_s = now_s
        answer.prompt_tokens = chunk.usage.prompt_tokens
        answer.completion_tokens = chunk.usage.completion_tokens
        answer.cached_tokens = chunk.usage.cached_tokens
    answer.e2el_s = time.perf_counter() - start_s
    return answer
