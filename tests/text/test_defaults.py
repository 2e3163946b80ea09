"""generation_config.json as what a request gets that doesn't say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aserve.errors import ConfigError
from aserve.text.defaults import NEUTRAL, GenerationDefaults, load_defaults


def write(directory: Path, **fields: object) -> Path:
    (directory / "generation_config.json").write_text(json.dumps(fields))
    return directory


def test_the_files_values_are_read_and_the_others_are_neutral(tmp_path: Path) -> None:
    directory = write(
        tmp_path, temperature=0.6, top_k=20, max_new_tokens=256, eos_token_id=[1, 2], top_p=None
    )
    found = load_defaults(directory)
    assert found == GenerationDefaults(temperature=0.6, top_k=20, max_new_tokens=256)
    assert str(found) == "temperature=0.6 top_k=20 max_new_tokens=256"


def test_a_model_without_the_file_has_neutral_defaults(tmp_path: Path) -> None:
    assert load_defaults(tmp_path) == NEUTRAL


def test_do_sample_is_ignored(tmp_path: Path) -> None:
    assert load_defaults(write(tmp_path, do_sample=False)) == NEUTRAL


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("top_p", 1.5),
        ("top_k", 2.5),
        ("min_p", True),
        ("repetition_penalty", 0),
        ("max_new_tokens", 0),
    ],
)
def test_a_wrong_value_is_named_with_its_file_and_the_way_around(
    tmp_path: Path, name: str, value: object
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_defaults(write(tmp_path, **{name: value}))
    message = caught.value.message
    assert "generation_config.json: " in message
    assert f"`$.{name}`" in message
    assert "--generation-config none" in message
