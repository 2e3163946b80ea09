"""An engine from nothing but a config.json."""

from __future__ import annotations

from pathlib import Path

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
