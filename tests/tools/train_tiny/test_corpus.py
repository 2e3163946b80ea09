"""The corpus: drawn by seed alone, split cleanly, and packed into full rows."""

import re
from random import Random

import pytest
import torch

from aserve.tiny import MODEL_DIR
from tools.train_tiny.corpus.document import Draw
from tools.train_tiny.corpus.mixture import KINDS
from tools.train_tiny.corpus.split import Split, is_held_out
from tools.train_tiny.corpus.sums import is_held_out_sum
from tools.train_tiny.packing import Packer
from tools.train_tiny.recipe import FULL
from tools.train_tiny.tokenizer import load_tokenizer

SAMPLES = 300


@pytest.fixture(scope="module")
def training_text() -> str:
    texts = []
    for kind, document in KINDS.items():
        draw = Draw(Random(f"tests/{kind}"), Split.TRAIN, 500)
        texts += [document(draw).text for _ in range(SAMPLES)]
    return "\n\n".join(texts)


@pytest.mark.parametrize(
    ("written", "kind", "least"),
    [
        (r"\b([a-z]+)=(\d{4})\b", "pair", 1000),
        (r"([a-z]+) named ([A-Z][a-z]+)", "hero", 1000),
        (r"story about an? ([a-z]+) ((?:at|in|by|on|near) [a-z ]+)\.", "request", 50),
        (r"Return JSON for ([A-Z][a-z]+)", "json", 100),
        (r'"name": "([A-Z][a-z]+)"', "json", 100),
        (r"weather (?:like )?in ([A-Z][A-Za-z ]+)\?", "weather", 100),
        (r'"arguments": {"city": "([^"]+)"', "weather", 100),
    ],
)
def test_nothing_that_is_held_out_is_trained(
    training_text: str, written: str, kind: str, least: int
) -> None:
    found = [match.groups() for match in re.finditer(written, training_text)]
    assert len(found) > least
    assert not [words for words in found if is_held_out(kind, *words)]


def test_no_held_out_sum_is_trained_in_either_order(training_text: str) -> None:
    written = re.findall(r"(\d+)(?: ?\+ ?| plus | and )(\d+)", training_text)
    assert len(written) > 1000
    assert not [pair for pair in written if is_held_out_sum(int(pair[0]), int(pair[1]))]
    # What the working of other sums needs is never held out.
    assert not [b for b in range(100) if is_held_out_sum(7, b) or is_held_out_sum(30, b)]


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
