"""The tokenizer: any text comes back, digits stand alone, reserved ids, and the chat template."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from aserve.tiny import MODEL_DIR
from tools.train_tiny.tokenizer import (
    BOS,
    RESERVED_TOKENS,
    VOCAB_SIZE,
    chat_prompt,
    load_tokenizer,
)

WEATHER = [{"role": "user", "content": "What is the weather in Rome?"}]
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {}}}


TOKENIZER = load_tokenizer(MODEL_DIR)


@pytest.fixture(scope="module")
def wrapped():
    return AutoTokenizer.from_pretrained(MODEL_DIR)


def rendered(wrapped, messages: list[Any], **options) -> str:
    return wrapped.apply_chat_template(messages, tokenize=False, **options)


@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text
    assert all(token_id < VOCAB_SIZE for token_id in ids)


def test_the_vocabulary_is_full_begins_with_the_reserved_tokens_and_has_single_digits() -> None:
    assert TOKENIZER.get_vocab_size() == VOCAB_SIZE
    assert [TOKENIZER.token_to_id(token) for token in RESERVED_TOKENS] == list(range(16))
    assert max(sum(c.isdigit() for c in token) for token in TOKENIZER.get_vocab()) == 1


def test_plain_text_and_chat_both_begin_with_one_bos(wrapped) -> None:
    assert wrapped("fox=").input_ids == TOKENIZER.encode("fox=").ids
    assert wrapped("fox=").input_ids[0] == BOS
    ids = wrapped.apply_chat_template(WEATHER, add_generation_prompt=True)["input_ids"]
    assert ids == chat_prompt(TOKENIZER, WEATHER[0]["content"])
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
