"""The text side of embedding models and classifiers: prompts, labels, activations and pairs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from aserve.config import ModelOptions
from aserve.errors import ConfigError, InvalidRequest
from aserve.messages.requests import EMBED, GenerateRequest, TextPrompt
from aserve.text.lengths import PromptLimits, truncate
from aserve.text.load import load_text
from aserve.text.pooling import PoolingTexts
from tests.text.vocabularies import bert_backend

CLS, SEP = 1, 2


def text_side(folder: Path, **files: object) -> PoolingTexts:
    bert_backend().save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return load_text(folder, ModelOptions()).pooling


def test_a_fixed_length_in_the_file_neither_cuts_nor_pads(tmp_path: Path) -> None:
    backend = bert_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=4)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_text(tmp_path, ModelOptions()).tokenizer
    assert tokenizer.encode("a", with_special=True) == [CLS, 3, SEP]
    assert tokenizer.encode("a b c d", with_special=True) == [CLS, 3, 4, 5, 6, SEP]


@pytest.mark.parametrize(
    ("kept", "keeps_start", "expected"),
    [
        (5, True, [CLS, 10, 11, 12, SEP]),
        (5, False, [CLS, 12, 13, 14, SEP]),
        (3, True, [CLS, 10, SEP]),
        (2, True, [CLS, 10]),
        (-1, True, [CLS, 10, 11, 12, 13, SEP]),
        (9, True, [CLS, 10, 11, 12, 13, 14, SEP]),
    ],
)
def test_truncation_keeps_the_special_tokens_of_a_text(
    kept: int, keeps_start: bool, expected: list[int]
) -> None:
    request = GenerateRequest(
        "a",
        TextPrompt("..."),
        EMBED,
        embeds=True,
        truncate_prompt_tokens=kept,
        truncates_end=keeps_start,
    )
    limits = PromptLimits(6, 100, affixes=(1, 1))
    assert truncate([CLS, 10, 11, 12, 13, 14, SEP], request, limits) == expected


def test_the_affixes_are_those_of_the_tokenizer(tmp_path: Path) -> None:
    assert text_side(tmp_path, config={}).affixes == (1, 1)
    assert PoolingTexts().affixes == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("max_len", [4, 5, 6, 7, 8, 9, 20])
@pytest.mark.parametrize("texts", [("a b c d", "e"), ("a", "b c d e"), ("a b", "c d e"), ("", "a")])
def test_a_pair_is_encoded_and_cut_as_transformers_does(
    texts: tuple[str, str], max_len: int, tmp_path: Path
) -> None:
    """Slow: it imports transformers. Token 100 + i is the token i of the second segment."""
    from transformers import PreTrainedTokenizerFast

    config = {"type_vocab_size": 2, "vocab_size": 100}
    encode = text_side(tmp_path, config=config).encode_pair
    assert encode is not None
    reference = PreTrainedTokenizerFast(tokenizer_object=bert_backend())
    asked = {"truncation": True, "max_length": max_len, "return_token_type_ids": True}
    both = reference(*texts, **asked)
    expected = zip(both["input_ids"], both["token_type_ids"], strict=True)
    assert encode(*texts, max_len) == [i + 100 * segment for i, segment in expected]


def test_a_model_without_segments_has_plain_ids(tmp_path: Path) -> None:
    encode = text_side(tmp_path, config={"type_vocab_size": 1, "vocab_size": 100}).encode_pair
    assert encode is not None
    assert encode("a", "b", 20) == [CLS, 3, SEP, 4, SEP]


@pytest.mark.parametrize(
    ("config", "scores", "expected"),
    [
        ({}, [0.0], [0.5]),
        ({}, [-1e30], [0.0]),
        ({}, [1.0, 1.0], [0.5, 0.5]),
        ({"problem_type": "multi_label_classification"}, [0.0, 0.0], [0.5, 0.5]),
        ({"problem_type": "regression"}, [3.0], [3.0]),
        ({"architectures": ["Qwen2ForRewardModel"]}, [3.0], [3.0]),
        ({"architectures": 5}, [0.0], [0.5]),
        ({"sentence_transformers": {"activation_fn": "torch.nn.Identity"}}, [3.0], [3.0]),
        ({"sbert_ce_default_activation_function": "torch.nn.Sigmoid"}, [0.0], [0.5]),
    ],
)
def test_the_activation_is_that_of_the_configuration(
    config: object, scores: list[float], expected: list[float], tmp_path: Path
) -> None:
    own = text_side(tmp_path, config=config).activated(np.array(scores, np.float32))
    assert own == pytest.approx(expected)


def test_labels_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    names = {str(i): f"label {i}" for i in (10, *range(10))}
    texts = text_side(tmp_path, config={"id2label": names})
    assert [texts.label(i) for i in range(12)] == [*(f"label {i}" for i in range(11)), "LABEL_11"]


def test_prompts_are_found_by_name_and_by_default(tmp_path: Path) -> None:
    prompts = {"query": "Query: ", "document": ""}
    named = {"prompts": prompts, "default_prompt_name": "query", "similarity_fn_name": "cosine"}
    texts = text_side(tmp_path, config_sentence_transformers=named)
    assert [texts.prompt(name) for name in (None, "query", "document")] == ["Query: "] * 2 + [""]
    with pytest.raises(InvalidRequest, match=r"'x' is not a prompt.*query, document"):
        texts.prompt("x")


@pytest.mark.parametrize(
    ("named", "complaint"),
    [
        ({"prompts": ["x"]}, "config_sentence_transformers.json"),
        ({"prompts": {}, "default_prompt_name": "x"}, "default_prompt_name 'x' is not one of"),
    ],
)
def test_malformed_prompts_are_refused(named: object, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=complaint):
        text_side(tmp_path, config_sentence_transformers=named)
