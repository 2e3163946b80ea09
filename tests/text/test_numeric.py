"""Text of a model without a tokenizer: numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from aserve.errors import ConfigError
from aserve.text.load import has_tokenizer, load_numeric_tokenizer
from aserve.text.tokenizer import numeric_template, numeric_tokenizer


def test_generated_text_encodes_to_the_same_ids() -> None:
    tokenizer = numeric_tokenizer(300)
    ids = [5, 17, 299, 0, 5]
    text = "7 8" + tokenizer.decode(ids)
    assert text == "7 8 5 17 299 0 5"
    assert tokenizer.encode(text, with_special=True) == [7, 8, *ids]


def test_any_white_space_parts_and_other_words_are_token_0() -> None:
    ids = numeric_tokenizer(10).encode(" 3\n\t4  fox 10 -1\n", with_special=False)
    assert ids == [3, 4, 0, 0, 0]


def test_messages_are_one_row_of_numbers() -> None:
    text = numeric_template().render([{"content": "1 2"}, {"content": "3"}])
    assert numeric_tokenizer(9).encode(text, with_special=False) == [1, 2, 3]


def test_size_and_ends_come_from_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 11, "eos_token_id": [2, 3]}')
    tokenizer = load_numeric_tokenizer(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.eos_ids) == (11, (2, 3))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"config\.json: vocab_size is None"):
        load_numeric_tokenizer(tmp_path)


def test_a_directory_with_a_tokenizer_does_not_get_the_numeric_one(tmp_path: Path) -> None:
    assert not has_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").touch()
    assert has_tokenizer(tmp_path)
