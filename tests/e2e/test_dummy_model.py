"""An engine from nothing but a config.json and what may lie beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from aserve.engine import Engine
from tests.gpu.weights.checkpoints import write_config


async def test_a_configuration_alone_answers_texts_ids_and_chats(tmp_path: Path) -> None:
    write_config(tmp_path)
    path = tmp_path / "config.json"
    chat = [{"role": "user", "content": "3 1 20"}]
    async with Engine(model=path, load_format="dummy", num_pages=20) as engine:
        answers = [
            await engine.answer(prompt, max_tokens=4, temperature=0, ignore_eos=True)
            for prompt in ("3 1 20", [3, 1, 20], chat)
        ]
    assert len({answer.text for answer in answers}) == 1
    (choice,) = answers[0].choices
    assert choice.text == "".join(f" {token_id}" for token_id in choice.token_ids)
    assert len(choice.token_ids) == 4


@pytest.mark.parametrize(("source", "num_tokens"), [("model", 5), ("none", 13)])
async def test_the_model_s_own_defaults_hold_unless_they_are_switched_off(
    tmp_path: Path, source: str, num_tokens: int
) -> None:
    write_config(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"max_new_tokens": 5, "top_k": 1}')
    engine = Engine(model=tmp_path, load_format="dummy", num_pages=20, generation_config=source)
    async with engine:
        told = await engine.answer([3, 1, 20], ignore_eos=True)
        greedy = await engine.answer([3, 1, 20], temperature=0, ignore_eos=True)
        said = await engine.answer([3, 1, 20], max_tokens=7, ignore_eos=True)
    assert len(told.choices[0].token_ids) == num_tokens
    assert (told.choices == greedy.choices) is (source == "model")
    assert len(said.choices[0].token_ids) == 7
