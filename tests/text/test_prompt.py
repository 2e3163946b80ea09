"""Prompts to ids, and the checks that need them."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from aserve.cache.page_keys import extend_keys, root_key
from aserve.errors import AserveError, ContextTooLong, InvalidRequest
from aserve.messages.base import array_i32
from aserve.messages.requests import (
    ChatPrompt,
    GenerateRequest,
    Grammar,
    Prompt,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
)
from aserve.text.defaults import bad_word_ids
from aserve.text.lengths import PromptLimits
from aserve.text.prompt import Prepared, PromptEncoder
from aserve.text.sampling_ids import end_ids
from aserve.text.template import ChatTemplate
from aserve.text.tokenizer import TextTokenizer
from tests.text.vocabularies import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
LIMITS = PromptLimits(max_model_len=10, vocab_size=TOKENIZER.vocab_size + 4)
SAMPLING = SamplingParams(seed=1)


def prepared(
    prompt: Prompt,
    sampling: SamplingParams = SAMPLING,
    *,
    template: str | None = None,
    tokenizer: TextTokenizer = TOKENIZER,
) -> Prepared:
    encoder = PromptEncoder(
        tokenizer, template=None if template is None else ChatTemplate(template), limits=LIMITS
    )
    return encoder.prepare(GenerateRequest("r", prompt, sampling, "space", 3, 1.5))


def test_a_prepared_request_has_its_ids_and_its_max_tokens() -> None:
    sampling = msgspec.structs.replace(SAMPLING, stop_token_ids=(5,))
    result = prepared(TokenPrompt((7, 8, 9)), sampling)
    assert array_i32(result.admit.prompt_ids).tolist() == [7, 8, 9]
    assert result.admit.sampling.max_tokens == result.open.sampling.max_tokens == 7
    assert result.admit.end_ids == (*TOKENIZER.eos_ids, 5)
    assert (result.admit.namespace, result.admit.priority) == ("space", 3)
    assert (result.open.request_id, result.open.prompt_len) == ("r", 3)


def test_a_request_carries_the_cache_keys_of_its_whole_pages() -> None:
    limits = msgspec.structs.replace(LIMITS, page_size=2)
    encoder = PromptEncoder(TOKENIZER, template=None, limits=limits)
    request = GenerateRequest("r", TokenPrompt((7, 8, 9, 10, 11)), SAMPLING, "space")
    keys: list[bytes] = []
    ids = np.array([7, 8, 9, 10, 11], np.int32)
    extend_keys(keys, ids, page_size=2, root=root_key("space"))
    assert encoder.prepare(request).admit.page_keys == b"".join(keys)
    assert len(keys) == 2
    assert prepared(TokenPrompt((7, 8, 9, 10, 11))).admit.page_keys == b""  # nothing is cached


def test_ignore_eos_keeps_stop_token_ids_and_the_end_of_a_grammar() -> None:
    asked = SamplingParams(seed=1, stop_token_ids=(5, 5), ignore_eos=True)
    assert end_ids(TOKENIZER, asked) == (5,)
    language = SamplingParams(seed=1, ignore_eos=True, grammar=Grammar("regex", "a"))
    assert end_ids(TOKENIZER, language) == TOKENIZER.eos_ids


@pytest.mark.parametrize("max_tokens", [0, 7])
def test_a_request_that_just_fits_is_accepted(max_tokens: int) -> None:
    sampling = SamplingParams(seed=1, max_tokens=max_tokens)
    assert prepared(TokenPrompt((1, 2, 3)), sampling).admit.sampling.max_tokens == max_tokens


@pytest.mark.parametrize(
    ("usual", "sampling", "expected"),
    [
        (4, SAMPLING, 4),
        (9, SAMPLING, 7),  # the rest of the context
        (4, SamplingParams(seed=1, max_tokens=6), 6),
        (4, SamplingParams(seed=1, min_tokens=5), 5),
    ],
)
def test_max_tokens_defaults_to_the_models_length_within_the_context(
    usual: int, sampling: SamplingParams, expected: int
) -> None:
    limits = msgspec.structs.replace(LIMITS, max_new_tokens=usual)
    encoder = PromptEncoder(TOKENIZER, template=None, limits=limits)
    request = GenerateRequest("r", TokenPrompt((1, 2, 3)), sampling)
    assert encoder.prepare(request).admit.sampling.max_tokens == expected


def test_a_request_that_is_one_token_too_long_is_refused_with_the_numbers() -> None:
    with pytest.raises(ContextTooLong) as caught:
        prepared(TokenPrompt((1, 2, 3)), SamplingParams(seed=1, max_tokens=8))
    assert caught.value.message == (
        "This model's maximum context length is 10 tokens. However, you requested 11 tokens "
        "(3 in the prompt, 8 in the completion). Please reduce the length of the prompt or "
        "completion."
    )
    assert caught.value.info().code == "context_length_exceeded"


SCORED = SamplingParams(seed=1, max_tokens=0)


def test_a_prompt_that_fills_the_context_may_only_be_scored() -> None:
    assert prepared(TokenPrompt((1,) * 10), SCORED).open.prompt_len == 10


@pytest.mark.parametrize(
    ("prompt", "sampling", "said", "param"),
    [
        (TokenPrompt((1,) * 10), SAMPLING, "maximum context length is 10 tokens", "prompt"),
        # Looking at each id first would take seconds that others wait for.
        (TokenPrompt((-1,) * 11), SAMPLING, "maximum context length", "prompt"),
        (TokenPrompt((1, 2, 3)), SamplingParams(seed=1, min_tokens=8), "min_tokens", "min_tokens"),
        (TextPrompt(""), SAMPLING, "empty", "prompt"),
        (TokenPrompt(()), SAMPLING, "empty", "prompt"),
        (TextPrompt("a\ud800"), SAMPLING, "Unicode", "prompt"),
    ],
)
def test_invalid_prompts_are_refused(
    prompt: Prompt, sampling: SamplingParams, said: str, param: str
) -> None:
    with pytest.raises(AserveError, match=said) as caught:
        prepared(prompt, sampling)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("num_ids", "max_tokens", "truncated", "expected"),
    [
        (3, 4, None, (0, 3, 4)),
        (3, 40, None, (0, 3, 7)),
        (3, None, None, (0, 3, 7)),
        (40, 4, None, (0, 9, 1)),
        (40, None, None, (0, 9, 1)),
        (40, 0, None, (0, 10, 0)),
        (40, 4, 5, (35, 5, 4)),  # the request keeps its end
        (40, 4, 20, (20, 9, 1)),
        (40, 4, -1, (34, 6, 4)),
    ],
)
def test_with_auto_truncate_a_prompt_loses_its_end_and_max_tokens_is_what_fits(
    num_ids: int, max_tokens: int | None, truncated: int | None, expected: tuple[int, int, int]
) -> None:
    limits = msgspec.structs.replace(LIMITS, auto_truncate=True)
    encoder = PromptEncoder(TOKENIZER, template=None, limits=limits)
    sampling = SamplingParams(seed=1, max_tokens=max_tokens)
    prompt = TokenPrompt(tuple(range(num_ids)))
    request = GenerateRequest("r", prompt, sampling, truncate_prompt_tokens=truncated)
    admit = encoder.prepare(request).admit
    first, *others = array_i32(admit.prompt_ids).tolist()
    assert (first, 1 + len(others), admit.sampling.max_tokens) == expected
    text = TextPrompt("a" * 40)
    assert len(encoder.prepare(GenerateRequest("r", text, sampling)).admit.prompt_ids) <= 40


@pytest.mark.parametrize("token_id", [-1, LIMITS.vocab_size, 2**40])
def test_unknown_token_ids_are_refused_in_every_field(token_id: int) -> None:
    asked = {
        "stop_token_ids": SamplingParams(seed=1, stop_token_ids=(token_id,)),
        "logit_bias": SamplingParams(seed=1, logit_bias=((token_id, 1.0),)),
        "allowed_token_ids": SamplingParams(seed=1, allowed_token_ids=(token_id,)),
        "prompt": SAMPLING,
    }
    for param, sampling in asked.items():
        prompt = TokenPrompt((1, token_id)) if param == "prompt" else TextPrompt("a")
        with pytest.raises(InvalidRequest, match="out of range") as caught:
            prepared(prompt, sampling)
        assert caught.value.param == param


A, B = (TOKENIZER.encode(letter, with_special=False)[0] for letter in "AB")
ONLY_A = {"allowed_token_ids": (A,)}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (ONLY_A | {"bad_words": ("A",), "ignore_eos": True}, "bad_words"),
        (ONLY_A | {"bad_words": ("BA", "A"), "min_tokens": 1}, "bad_words"),
        ({"allowed_token_ids": TOKENIZER.eos_ids, "min_tokens": 1}, "allowed_token_ids"),
        (ONLY_A | {"bad_words": ("A",)}, "bad_words"),
        ({"allowed_token_ids": (A, B), "bad_words": ("A",), "min_tokens": 1}, None),
        (ONLY_A | {"min_tokens": 1}, None),
    ],
)
def test_a_request_that_leaves_nothing_to_sample_is_refused(
    fields: dict[str, Any], param: str | None
) -> None:
    sampling = SamplingParams(1, **fields)
    if param is None:
        prepared(TextPrompt("a"), sampling)
        return
    with pytest.raises(InvalidRequest, match="nothing could be sampled") as caught:
        prepared(TextPrompt("a"), sampling)
    assert caught.value.param == param


def test_bad_words_reach_the_scheduler_as_ids() -> None:
    admit = prepared(TextPrompt("a"), SamplingParams(1, bad_words=("stop", "A"))).admit
    assert admit.bad_word_ids == bad_word_ids(("stop", "A"), TOKENIZER)


FEWER = msgspec.structs.replace(LIMITS, vocab_size=A)  # of which A and B are no tokens


@pytest.mark.parametrize("param", ["prompt", "messages", "prediction"])
def test_tokens_that_the_model_lacks_are_refused_in_texts(param: str) -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    encoder = PromptEncoder(TOKENIZER, template=template, limits=FEWER)
    texts: dict[str, Prompt] = {"prompt": TextPrompt("A"), "messages": chat("A")}
    prompt, prediction = texts.get(param, TextPrompt("!")), "B" if param == "prediction" else ""
    request = GenerateRequest("r", prompt, SAMPLING, prediction=prediction)
    with pytest.raises(InvalidRequest, match=r"out of range: this model's ids are 0") as caught:
        encoder.prepare(request)
    assert caught.value.param == param


def test_bad_words_that_the_model_cannot_say_never_reach_the_device() -> None:
    encoder = PromptEncoder(TOKENIZER, template=None, limits=FEWER)
    sampling = SamplingParams(1, bad_words=("!", "A", "!B"))
    admit = encoder.prepare(GenerateRequest("r", TextPrompt("!"), sampling)).admit
    assert admit.bad_word_ids == bad_word_ids(("!",), TOKENIZER)


def chat(content: str) -> ChatPrompt:
    return ChatPrompt(msgspec.json.encode([{"role": "user", "content": content}]), b"[{}]")


def test_a_chat_is_rendered_and_gets_no_special_tokens_but_its_own() -> None:
    template = "{{ messages[0].content }}{{ tools | length }}"
    result = prepared(chat("ab"), template=template)
    assert TOKENIZER.decode(array_i32(result.admit.prompt_ids).tolist()) == "ab1"


def test_a_chat_without_a_template_is_a_clear_error() -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        prepared(chat("ab"))


def test_the_error_of_a_chat_that_is_too_long_names_the_messages() -> None:
    with pytest.raises(ContextTooLong) as caught:
        prepared(chat("z" * 12), template="{{ messages[0].content }}")
    assert caught.value.param == "messages"


def test_tools_that_are_nested_too_deeply_are_a_client_error() -> None:
    prompt = ChatPrompt(b'[{"role": "user", "content": "a"}]', b'[{"a":' + b"[" * 100_000)
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        prepared(prompt, template="{{ tools }}")
