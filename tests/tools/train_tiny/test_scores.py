"""The bundled weights, in float32, on what training held out: the numbers the README promises."""

from __future__ import annotations

import re
from functools import partial

import pytest

from aserve.engine import Engine
from aserve.tiny import MODEL_DIR
from tests.architecture.source import ROOT
from tools.train_tiny.cases import Suite, all_suites
from tools.train_tiny.corpus.split import is_held_out
from tools.train_tiny.corpus.sums import is_held_out_sum
from tools.train_tiny.evaluate import held_out_loss, score
from tools.train_tiny.examples import EXAMPLES, MAX_TOKENS, shown
from tools.train_tiny.export import load_network
from tools.train_tiny.greedy import generate
from tools.train_tiny.network import Llama
from tools.train_tiny.tokenizer import load_tokenizer

REQUIRED = {
    "recall after 50": 95,
    "recall after 200": 95,
    "recall after 600": 85,
    "a+b=": 85,
    "What is a plus b?": 95,
    "Return JSON for": 90,
    "What is the weather in": 90,
    "stories of two persons": 18,
    "Write a story about": 18,
}
PAIR = re.compile(r"([a-z]+)=(\d{4})")
HERO = re.compile(r"an? ([a-z]+) named ([A-Z][a-z]+)\.")
TOKENIZER = load_tokenizer(MODEL_DIR)
SUITES = all_suites(TOKENIZER)


@pytest.fixture(scope="module")
def network() -> Llama:
    return load_network(MODEL_DIR)


@pytest.mark.slow
@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)
def test_the_model_reaches_its_score(network: Llama, suite: Suite) -> None:
    reached = score(suite, partial(generate, network), TOKENIZER)
    assert reached.num_right >= REQUIRED[suite.name], reached
    assert reached.num_cases == (20 if "stor" in suite.name else 100)


@pytest.mark.slow
def test_stories_cost_at_most_so_many_nats(network: Llama) -> None:
    assert held_out_loss(network, TOKENIZER, kind="story") <= 0.40


def test_every_case_is_held_out_and_none_is_asked_twice() -> None:
    by_name = {suite.name: [TOKENIZER.decode(c.prompt) for c in suite.cases] for suite in SUITES}
    assert all(len(set(prompts)) == len(prompts) for prompts in by_name.values())
    for name in ("a+b=", "What is a plus b?"):
        pairs = [map(int, re.findall(r"\d+", prompt)) for prompt in by_name[name]]
        assert all(is_held_out_sum(a, b) for a, b in pairs)
    recalls = [pair for prompt in by_name["recall after 50"] for pair in PAIR.findall(prompt)]
    assert len(recalls) == 400
    assert all(is_held_out("pair", *pair) for pair in recalls)
    assert all(is_held_out("json", case.expected) for case in SUITES[5].cases)
    assert all(is_held_out("weather", case.expected) for case in SUITES[6].cases)
    heroes = [HERO.findall(prompt)[0] for prompt in by_name["stories of two persons"]]
    assert all(is_held_out("hero", *hero) for hero in heroes)


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
