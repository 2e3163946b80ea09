"""The bundled weights, in float32, on what training held out: the numbers the README promises."""

import re
from functools import partial

import pytest

from aserve.tiny import MODEL_DIR
from tools.train_tiny.cases import Suite, all_suites, is_story_of_two, is_weather_call
from tools.train_tiny.corpus.split import is_held_out
from tools.train_tiny.corpus.sums import is_held_out_sum
from tools.train_tiny.evaluate import answer_text, held_out_loss, score
from tools.train_tiny.export import load_network
from tools.train_tiny.greedy import generate
from tools.train_tiny.network import Llama
from tools.train_tiny.tokenizer import EOT, chat_prompt, load_tokenizer

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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("question", "part"),
    [
        ("What is 27 plus 15?", "27 plus 15 is 42."),
        ("Return JSON for Sam.", '{"name": "Sam", '),
        ("What is the weather in Rome?", '{"city": "Rome"}'),
        ("Count: 5 6 7 8", "9 10 11 12 13"),
        ("Write a story about a dog at the beach.", "there was a dog named"),
    ],
)
def test_the_examples_of_the_readme_are_answered(network: Llama, question: str, part: str) -> None:
    ids = generate(network, [chat_prompt(TOKENIZER, question)], 400)[0]
    assert part in answer_text(ids, TOKENIZER)
    assert ids[-1] == EOT


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


def test_answers_are_judged_by_their_content() -> None:
    call = '<|tool_call|>{"name": "get_weather", "arguments": {"city": "Rome"}}<|/tool_call|>'
    assert is_weather_call(call, "Rome")
    assert not is_weather_call(call, "Oslo")
    assert not is_weather_call(call.replace("}}", "}"), "Rome")
    assert is_story_of_two("Mia met Tom. Tom and Mia were friends.", "Mia")
    assert not is_story_of_two("Mia met Mia. They were friends.", "Mia")
    assert not is_story_of_two("Mia met Tom. Tom and Ben were friends.", "Mia")
