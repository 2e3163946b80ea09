"""A model directory's files, as checkpoints of different ages have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aserve.errors import ConfigError
from aserve.text.load import load_tokenizer
from aserve.text.model_files import load_template
from aserve.tiny import MODEL_DIR
from tests.text.vocabularies import EOS, byte_level_backend


def write(folder: Path, **files: object) -> Path:
    """`tokenizer_config={...}` becomes tokenizer_config.json; beside it lies a tokenizer."""
    byte_level_backend().save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def test_end_tokens_are_read_from_every_file(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        generation_config={"eos_token_id": [7, 8]},
        config={"eos_token_id": 8, "text_config": {"eos_token_id": 9}},
        tokenizer_config={"eos_token": {"content": EOS}},
    )
    assert load_tokenizer(folder).eos_ids == (7, 8, 9, 0)


def test_a_directory_without_end_tokens_has_none(tmp_path: Path) -> None:
    assert load_tokenizer(write(tmp_path)).eos_ids == ()


@pytest.mark.parametrize(("setting", "has_bos"), [(True, True), (False, False)])
def test_bos_is_added_when_the_settings_say_so(
    tmp_path: Path, setting: bool, has_bos: bool
) -> None:
    folder = write(tmp_path, tokenizer_config={"bos_token": EOS, "add_bos_token": setting})
    assert (load_tokenizer(folder).encode("ab", with_special=True)[0] == 0) is has_bos


@pytest.mark.parametrize("content", ["", "{", "[]", "{}"])
def test_a_broken_tokenizer_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_broken_settings_file_is_named(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "generation_config.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"generation_config\.json: expected a JSON object"):
        load_tokenizer(tmp_path)


@pytest.mark.slow
def test_a_directory_without_a_tokenizer_is_a_clear_error(tmp_path: Path) -> None:
    """Slow: transformers is asked whether it can make one."""
    with pytest.raises(ConfigError, match="no usable tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.slow
def test_the_bundled_model_reads_text_and_chats_as_transformers_does() -> None:
    """Slow: it imports transformers."""
    from transformers import AutoTokenizer

    reference: Any = AutoTokenizer.from_pretrained(str(MODEL_DIR))
    tokenizer = load_tokenizer(MODEL_DIR)
    template = load_template(MODEL_DIR)
    assert template is not None
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "What is 27 plus 15? größer 日本 🚀"},
    ]
    prompt = template.render(messages)
    assert prompt == reference.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    for text, with_special in (("Once upon a time 1234", True), (prompt, False)):
        token_ids = tokenizer.encode(text, with_special=with_special)
        assert token_ids == reference.encode(text, add_special_tokens=with_special)
        assert tokenizer.decode(token_ids) == reference.decode(token_ids, skip_special_tokens=True)
    assert tokenizer.token_bytes(tokenizer.eos_ids[0]).decode() == reference.eos_token
