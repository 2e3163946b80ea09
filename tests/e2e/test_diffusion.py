"""A server of the small trained diffusion model, asked over HTTP, with the engine in a process of
its own.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from openai import AsyncOpenAI, BadRequestError

from aserve.text.load import load_tokenizer
from aserve.tiny import MODEL_DIR
from tests.e2e.server_process import ServerProcess
from tools.train_models.dllm import THRESHOLD, Dllm, write
from tools.train_models.folder import MODELS_DIR, complete_folder, load_member
from tools.train_models.llada import BLOCK_SIZE, Llada
from tools.train_tiny.evaluate import held_out_rows
from tools.train_tiny.tokenizer import load_tokenizer as training_tokenizer

pytestmark = pytest.mark.slow

STORY = "Once upon a time"
NUM_TOKENS = 90
NUM_STORIES, BEGINNING = 8, 24


def expected(prompt: list[int]) -> list[int]:
    """The answer in plain torch."""
    network = load_member(Dllm(), MODELS_DIR / "dllm")
    assert isinstance(network, Llada)
    return write(network, prompt, threshold=THRESHOLD, max_tokens=NUM_TOKENS).ids[:NUM_TOKENS]


async def test_an_answer_is_streamed_by_block_and_is_that_of_plain_torch(tmp_path: Path) -> None:
    folder = complete_folder(MODELS_DIR / "dllm", tmp_path / "dllm")
    settings = tmp_path / "settings.yaml"
    settings.write_text(f"threshold: {THRESHOLD}\n")
    options = ["--dllm-algorithm-config", str(settings), "--dtype", "float32", "--processes", "2"]
    tokenizer = load_tokenizer(MODEL_DIR)
    prompt = [1, *tokenizer.encode(STORY, with_special=False)]
    with ServerProcess(str(folder), *options) as process:
        assert process.address, process.text
        async with process.client() as client:
            stream = await client.completions.create(
                model="dllm",
                prompt=prompt,
                max_tokens=NUM_TOKENS,
                temperature=0,
                stream=True,
                extra_body={"return_token_ids": True},
            )
            chunks = [chunk async for chunk in stream]
            assert await tokens_per_forward(process, client) >= 2
            with pytest.raises(BadRequestError, match=r"diffusion language model.*logprobs"):
                await client.completions.create(model="dllm", prompt="Once", logprobs=2)
            with pytest.raises(BadRequestError, match=r"diffusion.*presence_penalty"):
                await client.chat.completions.create(
                    model="dllm",
                    messages=[{"role": "user", "content": "What is 2 plus 3?"}],
                    presence_penalty=0.5,
                )
    by_chunk = [json.loads(chunk.model_dump_json())["choices"][0]["token_ids"] for chunk in chunks]
    ids = [token_id for chunk in by_chunk for token_id in chunk or ()]
    answer = expected(prompt)
    assert ids == answer[: len(ids)]
    assert len(ids) >= len(answer) - 1 > 40  # without the stop token
    # The first block has the end of the prompt, too.
    num_blocks = -(-(len(prompt) + len(answer)) // BLOCK_SIZE) - len(prompt) // BLOCK_SIZE
    assert len([chunk for chunk in by_chunk if chunk]) == num_blocks


async def tokens_per_forward(process: ServerProcess, client: AsyncOpenAI) -> float:
    """Lets the model finish stories, all at once. Every pass counts, also those that were launched
    before it was known that an answer had ended."""
    rows = held_out_rows(training_tokenizer(MODEL_DIR), "story", NUM_STORIES)
    names = ("aserve_generation_tokens_total", "aserve_decodes_total")
    before = [process.metric(name) for name in names]
    asks = [
        client.completions.create(
            model="dllm", prompt=row[:BEGINNING], max_tokens=200, temperature=0
        )
        for row in rows
    ]
    answers = await asyncio.gather(*asks)
    num_tokens, num_decodes = (
        process.metric(name) - value for name, value in zip(names, before, strict=True)
    )
    assert num_tokens == sum(answer.usage.completion_tokens for answer in answers if answer.usage)
    return num_tokens / num_decodes
