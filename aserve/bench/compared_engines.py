"""Runs requests on the embedded engine and batches on transformers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from aserve.bench.streamed import Answer
from aserve.engine import Engine
from aserve.messages.base import array_i32


async def time_request(
    engine: Engine, prompt: list[int], *, max_tokens: int, temperature: float = 0.0
) -> Answer:
    """Generates exactly `max_tokens` tokens and times them. Raises the engine's errors."""
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


class TransformersEngine:
    def __init__(self, model_dir: Path, *, dtype: str, is_dummy: bool) -> None:
        """Loads the model. With `is_dummy` the weights are random, and only config.json is read."""
        from transformers import AutoConfig, AutoModelForCausalLM

        settings: dict[str, Any] = {
            "dtype": getattr(torch, dtype),
            "attn_implementation": "sdpa",
        }
        if is_dummy:
            config = AutoConfig.from_pretrained(model_dir, trust_remote_code=False)
            model = AutoModelForCausalLM.from_config(config, **settings)
        else:
            model = AutoModelForCausalLM.from_pretrained(
                model_dir, trust_remote_code=False, **settings
            )
        self._model = model.eval()
        self._model.generation_config.eos_token_id = None

    def generate(self, prompts: Sequence[list[int]], max_tokens: int) -> int:
        """Generates greedily for all prompts as one batch, and returns the number of tokens."""
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=max_tokens,
                pad_token_id=0,
            )
        return int(output.numel() - ids.numel())
