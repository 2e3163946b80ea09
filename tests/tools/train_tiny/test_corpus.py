"""The corpus: drawn by seed alone, split cleanly, and packed into full rows."""

import json
import re
from random import Random

import pytest
import torch

from aserve.tiny import MODEL_DIR
from tools.train_tiny.corpus.document import Draw
from tools.train_tiny.corpus.mixture import KINDS
from tools.train_tiny.corpus.names import GIRLS, PEOPLE
from tools.train_tiny.corpus.split import ALWAYS_HELD_OUT, Split, is_held_out
from tools.train_tiny.corpus.sums import is_held_out_sum
from tools.train_tiny.packing import Packer, encoded
from tools.train_tiny.recipe import FULL
from tools.train_tiny.tokenizer import BOS, load_tokenizer

SAMPLES = 300


def texts(kind: str, split: Split, *, count: int = SAMPLES, room: int = 500) -> list[str]:
    draw = Draw(Random(f"tests/{kind}"), split, room)
    return [KINDS[kind](draw).text for _ in range(count)]


@pytest.fixture(scope="module")
def training_text() -> str:
    return "\n\n".join(text for kind in KINDS for text in texts(kind, Split.TRAIN))


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_documents(kind: str) -> None:
    first = texts(kind, Split.TRAIN, count=20)
    assert first == texts(kind, Split.TRAIN, count=20)
    assert len(set(first)) > 1


def test_no_held_out_sum_is_trained_in_either_order(training_text: str) -> None:
    written = re.findall(r"(\d+)(?: ?\+ ?| plus | and )(\d+)", training_text)
    assert len(written) > 1000
    assert not [pair for pair in written if is_held_out_sum(int(pair[0]), int(pair[1]))]


def test_no_held_out_pair_of_key_and_value_is_trained(training_text: str) -> None:
    written = re.findall(r"\b([a-z]+)=(\d{4})\b", training_text)
    assert len(written) > 1000
    assert not [pair for pair in written if is_held_out("pair", *pair)]


def test_no_held_out_hero_is_trained(training_text: str) -> None:
    written = re.findall(r"([a-z]+) named ([A-Z][a-z]+)", training_text)
    assert len(written) > 1000
    assert not [pair for pair in written if is_held_out("hero", *pair)]


def test_no_held_out_story_request_is_trained(training_text: str) -> None:
    found = re.findall(r"story about an? ([a-z]+) ((?:at|in|by|on|near) [a-z ]+)\.", training_text)
    assert len(found) > 50
    assert not [pair for pair in found if is_held_out("request", *pair)]


def test_no_held_out_name_is_asked_for_as_json(training_text: str) -> None:
    asked = re.findall(r"Return JSON for ([A-Z][a-z]+)", training_text)
    written = re.findall(r'"name": "([A-Z][a-z]+)"', training_text)
    assert len(asked) > 100
    assert not [name for name in asked + written if is_held_out("json", name)]


def test_no_held_out_city_is_asked_for_its_weather(training_text: str) -> None:
    asked = re.findall(r"weather (?:like )?in ([A-Z][A-Za-z ]+)\?", training_text)
    called = re.findall(r'"arguments": {"city": "([^"]+)"', training_text)
    assert len(asked) > 100
    assert not [city for city in asked + called if is_held_out("weather", city)]


def test_the_examples_of_the_readme_are_held_out() -> None:
    assert all(is_held_out(*key) for key in ALWAYS_HELD_OUT)
    assert is_held_out_sum(27, 15)


def test_what_the_working_of_other_sums_needs_is_never_held_out() -> None:
    assert not [b for b in range(100) if is_held_out_sum(7, b) or is_held_out_sum(30, b)]


@pytest.mark.parametrize("split", Split)
def test_a_story_has_two_persons_and_their_own_pronouns(split: Split) -> None:
    for text in texts("story", split, room=150):
        names = list(dict.fromkeys(n for n in re.findall(r"[A-Z][a-z]+", text) if n in PEOPLE))
        assert len(names) == 2, text
        home = re.search(r"\b(He|She) lived", text)
        assert home is None or (home.group(1) == "She") == (names[0] in GIRLS), text


def test_records_are_json() -> None:
    for text in texts("records", Split.TRAIN):
        assert all(set(record) == {"name", "age", "city"} for record in json.loads(text))


def test_a_recall_document_fills_its_room_and_not_more() -> None:
    tokenizer = load_tokenizer(MODEL_DIR)
    draw = Draw(Random("tests/room"), Split.TRAIN, 1000)
    lens = [len(encoded(tokenizer, KINDS["recall"](draw))[0]) for _ in range(200)]
    assert max(lens) > 800
    assert sum(length > 1000 for length in lens) < 20


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    tokenizer = load_tokenizer(MODEL_DIR)
    stage = FULL.stages[1]
    one, same, other = (Packer(tokenizer, stage, seed=seed) for seed in (1, 1, 2))
    one.batch(6)
    batch = one.batch(7)
    assert batch.ids.shape == (stage.rows, stage.length + 1)
    assert batch.weights.shape == (stage.rows, stage.length)
    assert torch.equal(batch.ids, same.batch(7).ids)
    assert not torch.equal(batch.ids, other.batch(7).ids)
    assert not torch.equal(batch.ids, one.batch(8).ids)


def test_recalled_digits_weigh_more_than_random_ones() -> None:
    tokenizer = load_tokenizer(MODEL_DIR)
    draw = Draw(Random("tests/weights"), Split.TRAIN, 60)
    document = KINDS["recall"](draw)
    ids, weights = encoded(tokenizer, document)
    assert tokenizer.decode(ids) == document.text
    key, value = re.findall(r"([a-z]+)=(\S+)", document.text)[0]
    first, last = document.text.index(value), document.text.rindex(value)
    assert document.text.count(f"{key}=") == 2
    offsets = tokenizer.encode(document.text, add_special_tokens=False).offsets
    weight_at = {start: weight for (start, _), weight in zip(offsets, weights, strict=True)}
    assert weight_at[last] > 10 * weight_at[first]


def test_rows_begin_with_a_document_and_mostly_with_bos() -> None:
    packer = Packer(load_tokenizer(MODEL_DIR), FULL.stages[0], seed=0)
    starts = [row[0] for step in range(10) for row in packer.batch(step).ids.tolist()]
    assert 0.8 < starts.count(BOS) / len(starts) < 1.0
