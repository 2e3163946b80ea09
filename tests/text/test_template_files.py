"""Where a chat template is found, and what is said of one that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aserve.errors import ConfigError
from aserve.text.model_files import load_template
from aserve.text.template import ChatTemplate

TOOLS: list[dict[str, Any]] = [{"type": "function"}]


def write(folder: Path, **files: object) -> Path:
    """`tokenizer_config={...}` becomes tokenizer_config.json."""
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def found(folder: Path, given: str | None = None) -> ChatTemplate:
    template = load_template(folder, given)
    assert template is not None
    return template


def rendered(folder: Path, given: str | None = None) -> str:
    return found(folder, given).render([])


def refusal_of(folder: Path, given: str | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_template(folder, given)
    return caught.value.message


def test_a_template_file_wins_over_the_settings(tmp_path: Path) -> None:
    folder = write(tmp_path, tokenizer_config={"chat_template": "old"})
    assert rendered(folder) == "old"
    write(tmp_path, chat_template={"chat_template": "newer"})
    assert rendered(folder) == "newer"
    (folder / "chat_template.jinja").write_text("newest")
    assert rendered(folder) == "newest"


def test_named_templates_are_for_chats_and_for_tools(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    folder = write(tmp_path, tokenizer_config={"chat_template": named})
    assert found(folder).render([]) == "plain"
    assert found(folder).render([], tools=TOOLS) == "tools"


def test_further_templates_may_be_separate_files(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("plain")
    assert found(tmp_path).render([], tools=TOOLS) == "plain"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert found(tmp_path).render([]) == "plain"
    assert found(tmp_path).render([], tools=TOOLS) == "tools"


def test_a_template_sees_the_special_tokens(tmp_path: Path) -> None:
    settings = {
        "chat_template": "{{ bos_token }}{{ eos_token }}{{ pad_token }}",
        "bos_token": "<s>",
        "eos_token": {"content": "</s>"},
        "pad_token": None,
    }
    assert rendered(write(tmp_path, tokenizer_config=settings)) == "<s></s>"
    assert rendered(tmp_path, "[{{ eos_token }}]") == "[</s>]"


@pytest.mark.parametrize("named", [[], [{"name": "rag", "template": "documents"}]])
def test_a_model_without_a_default_template_has_none(tmp_path: Path, named: object) -> None:
    assert load_template(tmp_path) is None
    assert load_template(write(tmp_path, tokenizer_config={"chat_template": named})) is None


def test_a_given_template_has_priority_as_a_file_or_as_text(tmp_path: Path) -> None:
    folder = write(tmp_path, tokenizer_config={"chat_template": "own"})
    file = tmp_path / "mine.txt"
    file.write_text("from a file")
    assert rendered(folder, str(file)) == "from a file"
    assert rendered(folder, "inline{# nothing #}") == "inline"


def test_a_missing_template_file_is_not_taken_for_a_template(tmp_path: Path) -> None:
    message = refusal_of(tmp_path, "no/such.jinja")
    assert message.startswith("--chat-template no/such.jinja: there is no such file")


def test_an_error_in_a_template_names_its_file_and_line(tmp_path: Path) -> None:
    write(tmp_path, tokenizer_config={"chat_template": "{% if %}"})
    where = tmp_path / "tokenizer_config.json"
    assert refusal_of(tmp_path).startswith(f"the chat template of {where} has an error in line 1: ")
    where = tmp_path / "chat_template.jinja"
    where.write_text("fine\n{{ broken")
    assert refusal_of(tmp_path).startswith(f"the chat template of {where} has an error in line 2: ")
    assert "template of --chat-template has an error in line 1" in refusal_of(tmp_path, "{{")
    where.write_text("{{ 1 | unheard_of }}")
    assert str(where) in refusal_of(tmp_path)


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    where = tmp_path / "chat_template.jinja"
    where.write_bytes(b"\xff\xfe")
    assert refusal_of(tmp_path).startswith(f"the chat template {where} cannot be read: ")


@pytest.mark.parametrize("value", [7, {"default": "x"}, [{"name": "default"}], ["x"]])
def test_the_error_of_a_malformed_template_field_names_its_file(
    tmp_path: Path, value: object
) -> None:
    write(tmp_path, tokenizer_config={"chat_template": value})
    assert "tokenizer_config.json: chat_template must be a text or" in refusal_of(tmp_path)
