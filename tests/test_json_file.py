"""JSON files of checkpoints: what Python reads is read, and nothing ends in a traceback."""

import math
from pathlib import Path

import pytest

from aserve.errors import ConfigError
from aserve.json_file import read_json_file, texts_in

DEEP = "[" * 100_000 + "]" * 100_000


def written(folder: Path, data: bytes) -> Path:
    path = folder / "config.json"
    path.write_bytes(data)
    return path


def test_a_byte_order_mark_is_no_reason_to_refuse_a_file(tmp_path: Path) -> None:
    path = written(tmp_path, b'\xef\xbb\xbf{"a": 1}')
    assert read_json_file(path) == {"a": 1}


def test_numbers_that_strict_decoders_refuse_are_read(tmp_path: Path) -> None:
    path = written(tmp_path, b'{"unread": [Infinity, -Infinity]}')
    assert read_json_file(path) == {"unread": [math.inf, -math.inf]}


def test_a_pair_of_escapes_is_one_character(tmp_path: Path) -> None:
    assert read_json_file(written(tmp_path, b'["\\uD83D\\uDE00"]')) == ["\U0001f600"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (DEEP, "its values are nested too deeply"),
        (f'{{"a": {DEEP}}}', "its values are nested too deeply"),
        ('{"\\udfff": 1}', "surrogates not allowed"),
        (f"[{'9' * 5000}]", "4300 digits"),
        ('{"a": ', "Expecting value"),
    ],
    ids=["deep", "deep in a field", "half a character", "digits", "cut"],
)
def test_what_cannot_be_read_is_one_sentence_with_the_file(
    text: str, complaint: str, tmp_path: Path
) -> None:
    path = written(tmp_path, text.encode())
    with pytest.raises(ConfigError, match=complaint) as caught:
        read_json_file(path)
    assert str(caught.value).startswith(f"{path} cannot be read: ")


def test_a_file_that_is_not_there_is_the_callers_to_explain(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_json_file(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("value", "texts"), [(5, []), ("ab", []), (None, []), (["a", 5, ["b"]], ["a"])]
)
def test_a_value_of_another_kind_has_no_texts(value: object, texts: list[str]) -> None:
    assert texts_in(value) == texts
