"""The tokenizer: any text comes back, digits stand alone, reserved ids, and the chat template."""

import json
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from aserve.tiny import MODEL_DIR
from tools.train_tiny.corpus.document import Draw
from tools.train_tiny.corpus.mixture import KINDS
from tools.train_tiny.corpus.split import Split
from tools.train_tiny.recipe import QUICK
from tools.train_tiny.tokenizer import (
    BOS,
    RESERVED_TOKENS,
    VISIBLE,
    VOCAB_SIZE,
    chat_prompt,
    load_tokenizer,
)
from tools.train_tiny.train import corpus_tokenizer

WEATHER = [{"role": "user", "content": "What is the weather in Rome?"}]
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {}}}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(MODEL_DIR)


@pytest.fixture(scope="module")
def wrapped():
    return AutoTokenizer.from_pretrained(MODEL_DIR)


def rendered(wrapped, messages: list[Any], **options) -> str:
    return wrapped.apply_chat_template(messages, tokenize=False, **options)


@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    tokenizer = load_tokenizer(MODEL_DIR)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert all(token_id < VOCAB_SIZE for token_id in ids)


def test_every_digit_is_one_token(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("fox=3729", add_special_tokens=False).ids
    assert [tokenizer.decode([token_id]) for token_id in ids[-4:]] == ["3", "7", "2", "9"]
    longest = max(sum(c.isdigit() for c in token) for token in tokenizer.get_vocab())
    assert longest == 1


def test_the_vocabulary_is_full_and_begins_with_the_reserved_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert [tokenizer.token_to_id(token) for token in RESERVED_TOKENS] == list(range(16))


def test_working_and_calls_stay_visible_in_decoded_text(tokenizer: Tokenizer) -> None:
    text = tokenizer.decode(list(range(16)), skip_special_tokens=True)
    assert all((token in text) == (token in VISIBLE) for token in RESERVED_TOKENS)


def test_plain_text_and_chat_both_begin_with_one_bos(tokenizer: Tokenizer, wrapped) -> None:
    assert wrapped("fox=").input_ids == tokenizer.encode("fox=").ids
    assert wrapped("fox=").input_ids[0] == BOS
    ids = wrapped.apply_chat_template(WEATHER, add_generation_prompt=True)["input_ids"]
    assert ids == chat_prompt(tokenizer, WEATHER[0]["content"])
    assert ids.count(BOS) == 1


def test_the_template_writes_a_conversation_as_the_corpus_does(wrapped) -> None:
    call = {"name": "get_weather", "arguments": {"city": "Rome"}}
    messages: list[Any] = [
        {"role": "system", "content": "Answer briefly."},
        *WEATHER,
        {"role": "assistant", "content": None, "tool_calls": [{"function": call}]},
        {"role": "tool", "content": '{"weather": "sunny", "celsius": 21}'},
    ]
    assert rendered(wrapped, messages, tools=[TOOL], add_generation_prompt=True) == (
        "<|bos|><|system|>Answer briefly.\nTools: get_weather<|eot|>"
        "<|user|>What is the weather in Rome?<|eot|>"
        f"<|assistant|><|tool_call|>{json.dumps(call)}<|/tool_call|><|eot|>"
        '<|system|>Tool result: {"weather": "sunny", "celsius": 21}<|eot|><|assistant|>'
    )


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        (WEATHER, "<|bos|><|user|>What is the weather in Rome?<|eot|>"),
        ([{"role": "developer", "content": "Hi"}], "<|bos|><|system|>Hi<|eot|>"),
        (
            [{"role": "user", "content": "Hi"}, {"role": "system", "content": "Be kind."}],
            "<|bos|><|user|>Hi<|eot|><|system|>Be kind.<|eot|>",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
            "<|bos|><|user|>Hi<|eot|>",
        ),
    ],
)
def test_the_template_takes_any_role_and_text_parts(wrapped, messages, expected: str) -> None:
    assert rendered(wrapped, messages) == expected


def test_tools_alone_make_a_system_turn(wrapped) -> None:
    text = rendered(wrapped, WEATHER, tools=[TOOL])
    assert text.startswith("<|bos|><|system|>Tools: get_weather<|eot|><|user|>")


def test_training_the_tokenizer_twice_gives_the_same_one() -> None:
    assert corpus_tokenizer(QUICK, seed=0).to_str() == corpus_tokenizer(QUICK, seed=0).to_str()


def test_roles_in_the_corpus_are_reserved_tokens(tokenizer: Tokenizer) -> None:
    draw = Draw(Random("tests/roles"), Split.TRAIN, 200)
    ids = tokenizer.encode(KINDS["chat_tool"](draw).text, add_special_tokens=False).ids
    assert {RESERVED_TOKENS.index("<|user|>"), RESERVED_TOKENS.index("<|eot|>")} <= set(ids)
