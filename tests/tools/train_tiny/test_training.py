"""The training of the bundled model: its corpus, its tokenizer, and a few steps of each stage."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, LlamaForCausalLM

from aserve.tiny import MODEL_DIR
from tools.train_tiny.corpus.document import Draw
from tools.train_tiny.corpus.mixture import KINDS
from tools.train_tiny.corpus.split import Split, is_held_out
from tools.train_tiny.corpus.sums import is_held_out_sum
from tools.train_tiny.export import load_network
from tools.train_tiny.network import Llama, Shape
from tools.train_tiny.packing import Packer
from tools.train_tiny.recipe import FULL, QUICK
from tools.train_tiny.tokenizer import BOS, EOS, EOT, VOCAB_SIZE, chat_prompt, load_tokenizer
from tools.train_tiny.training import Progress, Run, next_token_loss, save_checkpoint, train


@pytest.mark.slow
def test_a_quick_training_runs_end_to_end(tmp_path: Path) -> None:
    options = ["--quick", "--precision", "float32", "--output", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "tools.train_tiny.train", *options],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "chat_smalltalk" in done.stdout
    theirs = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = torch.tensor([AutoTokenizer.from_pretrained(tmp_path)("A time, 27+15=").input_ids])
    with torch.inference_mode():
        ours = load_network(tmp_path)(ids)
        torch.testing.assert_close(ours, theirs(ids).logits, atol=1e-4, rtol=1e-4)
    assert theirs.generation_config.eos_token_id == [EOS, EOT]


def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    recipe = replace(QUICK, stages=QUICK.stages[:1])
    path = tmp_path / "run.safetensors"
    save_checkpoint(Llama(Shape(num_hidden_layers=1)), path, next_step=9)
    seen: list[Progress] = []
    network = Llama(Shape(num_hidden_layers=1))
    run = Run(
        recipe,
        batches=lambda stage: Packer(TOKENIZER, stage, seed=0),
        loss=lambda batch: next_token_loss(network(batch.ids[:, :-1]), batch),
        precision=torch.float32,
        checkpoint=path,
    )
    train(network, run, report=seen.append)
    assert [progress.step for progress in seen] == [9, 10, 11]
    assert seen[-1].num_tokens == recipe.num_tokens


WEATHER = [{"role": "user", "content": "What is the weather in Rome?"}]
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {}}}


TOKENIZER = load_tokenizer(MODEL_DIR)


@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text
    assert all(token_id < VOCAB_SIZE for token_id in ids)


def test_the_template_writes_a_conversation_as_the_corpus_does_with_one_bos() -> None:
    wrapped: Any = AutoTokenizer.from_pretrained(MODEL_DIR)
    assert wrapped("fox=").input_ids == TOKENIZER.encode("fox=").ids
    ids = wrapped.apply_chat_template(WEATHER, add_generation_prompt=True)["input_ids"]
    assert ids == chat_prompt(TOKENIZER, WEATHER[0]["content"])
    assert (ids[0], ids.count(BOS)) == (BOS, 1)
    call = {"name": "get_weather", "arguments": {"city": "Rome"}}
    messages: list[Any] = [
        {"role": "system", "content": "Answer briefly."},
        *WEATHER,
        {"role": "assistant", "content": None, "tool_calls": [{"function": call}]},
        {"role": "tool", "content": '{"weather": "sunny", "celsius": 21}'},
    ]
    options = {"tools": [TOOL], "tokenize": False, "add_generation_prompt": True}
    assert wrapped.apply_chat_template(messages, **options) == (
        "<|bos|><|system|>Answer briefly.\nTools: get_weather<|eot|>"
        "<|user|>What is the weather in Rome?<|eot|>"
        f"<|assistant|><|tool_call|>{json.dumps(call)}<|/tool_call|><|eot|>"
        '<|system|>Tool result: {"weather": "sunny", "celsius": 21}<|eot|><|assistant|>'
    )


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
    stage = FULL.stages[1]
    one, same, other = (Packer(TOKENIZER, stage, seed=seed) for seed in (1, 1, 2))
    one.batch(6)
    batch = one.batch(7)
    assert batch.ids.shape == (stage.rows, stage.length + 1)
    assert batch.weights.shape == (stage.rows, stage.length)
    assert torch.equal(batch.ids, same.batch(7).ids)
    assert not torch.equal(batch.ids, other.batch(7).ids)
    assert not torch.equal(batch.ids, one.batch(8).ids)
