"""The transcripts on the model's card are what the engine answers today."""

from __future__ import annotations

import pytest

from aserve.engine import Engine
from tests.architecture.source import ROOT
from tools.train_tiny.examples import EXAMPLES, MAX_TOKENS, shown

CARD = ROOT / "aserve" / "tiny" / "model" / "README.md"


@pytest.mark.slow
def test_the_answers_on_the_card_are_those_of_the_bundled_model() -> None:
    card = CARD.read_text()
    prompts = [
        [{"role": "user", "content": example.text}] if example.is_chat else example.text
        for example in EXAMPLES
    ]
    with Engine() as engine:
        answers = engine.generate_sync(prompts, temperature=0, max_tokens=MAX_TOKENS)
    for example, answer in zip(EXAMPLES, answers, strict=True):
        assert shown(example, answer.text) in card, example.text
