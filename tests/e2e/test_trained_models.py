"""Servers of the small trained models with experts and latent attention, asked over HTTP."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from aserve.text.load import load_tokenizer
from aserve.tiny import MODEL_DIR
from tests.e2e.server_process import ServerProcess
from tools.train_models.folder import MODELS_DIR, complete_folder, load_member
from tools.train_models.ngram_emb import NgramEmb

pytestmark = pytest.mark.slow

HISPARSE = ("--enable-hisparse", "--hisparse-config", '{"device_buffer_size": 34}')
STORY = "Write a story about a cat named Tom."


def transformers_answer(folder: Path, num_tokens: int) -> str:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chat = [{"role": "user", "content": STORY}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    with torch.inference_mode():
        made = model.generate(**ids, max_new_tokens=num_tokens, do_sample=False)
    text: str = tokenizer.decode(made[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("moe", ["--speculative-algorithm", "NGRAM"]),
        ("mla", ["--speculative-algorithm", "NEXTN", "--processes", "2"]),
        ("dsa", [*HISPARSE, "--processes", "2"]),
    ],
)
async def test_a_chat_has_the_answer_of_transformers(
    name: str, options: list[str], tmp_path: Path
) -> None:
    """The engine is a process of its own in all but the first."""
    folder = complete_folder(MODELS_DIR / name, tmp_path / name)
    with ServerProcess(str(folder), "--dtype", "float32", *options) as process:
        assert process.address, process.text
        async with process.client() as client:
            answer = await client.chat.completions.create(
                model=name,
                messages=[{"role": "user", "content": STORY}],
                max_tokens=24,
                temperature=0,
            )
        info = json.loads(await asyncio.to_thread(process.get, "/server_info"))
    text = answer.choices[0].message.content
    assert text is not None
    assert text == transformers_answer(folder, 24)
    assert len(text) > 20
    hot_bytes = info.get("hisparse_bytes_per_request")
    # 34 rows and the new one of 6 layers: 128 float32 numbers, a position and a clock each
    assert hot_bytes == (35 * 6 * (128 * 4 + 16) if name == "dsa" else None)
    assert ("HiSparse with 34 hot rows" in process.text) is (name == "dsa")


@pytest.mark.parametrize("processes", ["1", "2"])
async def test_ngram_embeddings_over_http_give_the_tokens_of_the_network(
    processes: str, tmp_path: Path
) -> None:
    """N-gram drafts and pages of 4 tokens, with the second answer's prompt from the cache."""
    folder = complete_folder(MODELS_DIR / "ngram_emb", tmp_path / "ngram_emb")
    network = load_member(NgramEmb(), folder)
    prompt = [1, *load_tokenizer(MODEL_DIR).encode("One day Sam and Mia found", with_special=False)]
    ids = list(prompt)
    with torch.inference_mode():
        while len(ids) < len(prompt) + 24:
            ids.append(int(network(torch.tensor([ids]))[0, -1].argmax()))
    options = ("--dtype", "float32", "--page-size", "4", "--speculative-algorithm", "NGRAM")
    with ServerProcess(str(folder), "--processes", processes, *options) as process:
        assert process.address, process.text
        async with process.client() as client:
            for _ in range(2):
                answer = await client.completions.create(
                    model="ngram_emb",
                    prompt=prompt,
                    max_tokens=24,
                    temperature=0,
                    extra_body={"return_token_ids": True, "ignore_eos": True},
                )
                assert (answer.choices[0].model_extra or {})["token_ids"] == ids[len(prompt) :]
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == (len(prompt) - 1) // 4 * 4
