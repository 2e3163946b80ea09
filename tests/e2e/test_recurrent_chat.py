"""A server of a model with recurrent layers: the next turn of a chat does not compute it anew,
unless its `cache_salt` is another.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from aserve.tiny import MODEL_DIR
from tests.e2e.server_process import ServerProcess
from tests.parity.references import new_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SYSTEM = "You tell stories about a cat, a dog, and a little girl whose name is Sue. " * 8


def make_model(directory: Path) -> None:
    new_model("qwen3.5", vocab_size=4096, max_position_embeddings=1024).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(MODEL_DIR / name, directory)


async def chat(
    session: aiohttp.ClientSession, server: ServerProcess, messages: list[dict[str, str]], salt: str
) -> Any:
    sampling = {"max_tokens": 8, "temperature": 0.9, "seed": 5}
    body = {"model": "chat", "messages": messages, "cache_salt": salt, **sampling}
    async with session.post(f"{server.address}/v1/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()


def cached_tokens(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_the_next_turn_begins_behind_the_prompt_of_the_last_one(tmp_path: Path) -> None:
    make_model(tmp_path)
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Who is Sue?"}]
    options = ("--model", str(tmp_path), "--served-model-name", "chat", "--dtype", "float64")
    with ServerProcess(*options) as server:
        assert server.address, server.text
        async with aiohttp.ClientSession() as session:
            first = await chat(session, server, messages, "a")
            answer = first["choices"][0]["message"]["content"]
            messages += [
                {"role": "assistant", "content": answer},
                {"role": "user", "content": "And the cat?"},
            ]
            second = await chat(session, server, messages, "a")
            third = await chat(session, server, messages, "b")
        code, _ = server.end()
    assert code == 0, server.text
    assert "checkpoints of these states" in server.text
    assert cached_tokens(first) == 0
    assert first["usage"]["prompt_tokens"] - cached_tokens(second) <= 16
    assert cached_tokens(third) == 0
    assert third["choices"] == second["choices"]
