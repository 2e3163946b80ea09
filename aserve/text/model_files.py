"""Reads a JSON object from a model directory. Errors name the file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from aserve.errors import ConfigError
from aserve.text.template import ChatTemplate


def read_json(path: Path) -> dict[str, Any]:
    """Nothing for a file that is not there."""
    try:
        value = msgspec.json.decode(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


MARKS = ("{{", "{%", "{#")  # one of them is in every template, and in no sensible path
SETTINGS = "tokenizer_config.json"
FOR_CHAT = "default"
FOR_TOOLS = "tool_use"  # transformers takes it for messages with tools


def load_template(model_dir: Path, given: str | None = None) -> ChatTemplate | None:
    """`given` is a file or a template itself. A template in a file of its own wins over the one in
    the tokenizer's settings.
    """
    settings = read_json(model_dir / SETTINGS)
    special_tokens = _special_tokens(settings)
    if given is not None:
        source, where = _given_source(given)
        return ChatTemplate(source, where=where, special_tokens=special_tokens)
    sources, where = _model_sources(model_dir)
    if FOR_CHAT not in sources:
        return None
    return ChatTemplate(
        sources[FOR_CHAT],
        with_tools=sources.get(FOR_TOOLS),
        where=where,
        special_tokens=special_tokens,
    )


def _given_source(given: str) -> tuple[str, str]:
    """The template and what to call it."""
    if any(mark in given for mark in MARKS):
        return given, "--chat-template"
    path = Path(given).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"--chat-template {given}: there is no such file, and it is no template itself, "
            f"which would have one of {' '.join(MARKS)}"
        )
    return _read(path), str(path)


def _model_sources(model_dir: Path) -> tuple[dict[str, str], str]:
    """Templates by their names, and the file that they are in."""
    own = model_dir / "chat_template.jinja"
    if own.is_file():
        more = sorted((model_dir / "additional_chat_templates").glob("*.jinja"))
        return {FOR_CHAT: _read(own), **{path.stem: _read(path) for path in more}}, str(own)
    for path in (model_dir / "chat_template.json", model_dir / SETTINGS):
        found = read_json(path).get("chat_template")
        if found:
            return _named(found, path), str(path)
    return {}, ""


def _named(value: object, path: Path) -> dict[str, str]:
    """One template, or a list of named ones."""
    items = value if isinstance(value, list) else [{"name": FOR_CHAT, "template": value}]
    named: dict[str, str] = {}
    for item in items:
        match item:
            case {"name": str(name), "template": str(source)}:
                named[name] = source
            case _:
                raise ConfigError(
                    f"{path}: chat_template is neither a text nor a list of objects with a name "
                    "and a template"
                )
    return named


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the chat template {path} cannot be read: {error}") from error


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    texts = {name: token_text(value) for name, value in settings.items() if name.endswith("_token")}
    return {name: text for name, text in texts.items() if text is not None}


def token_text(token: object) -> str | None:
    """A special token is written as its text or as an object with its `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None
