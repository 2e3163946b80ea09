"""Reads JSON files and the chat template from a model directory. Errors name the file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from aserve.errors import ConfigError
from aserve.json_file import read_json_object
from aserve.text.template import RESERVED, ChatTemplate

MARKS = ("{{", "{%", "{#")  # every template has one of them, and no sensible path does
SETTINGS = "tokenizer_config.json"
FOR_CHAT = "default"
FOR_TOOLS = "tool_use"  # transformers uses it for messages with tools
# The prompt of Qwen3-Reranker's model card, for the messages `query` and `document`.
QWEN3_RERANKER = """\
<|im_start|>system
Judge whether the Document meets the requirements based on the Query and the Instruct provided. \
Note that the answer can only be "yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: {{ instruct | default("Given a web search query, retrieve relevant passages that \
answer the query") }}
<Query>: {{ messages[0].content }}
<Document>: {{ messages[1].content }}<|im_end|>
<|im_start|>assistant
<think>

</think>

{{ "" }}"""
TEMPLATES = {"qwen3-reranker": QWEN3_RERANKER}  # that --chat-template names


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object of a file, or an empty one if the file does not exist."""
    try:
        return read_json_object(path)
    except FileNotFoundError:
        return {}


def read_object(text: str, where: str) -> dict[str, Any]:
    """Returns the JSON object that an option has."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        example = '{"name": 1}'
        raise ConfigError(f"{where}: {error}; it is a JSON object such as {example}") from None


def load_template(
    model_dir: Path, given: str | None = None, *, variables: str = "{}"
) -> ChatTemplate | None:
    """Loads the template from `given`, which is a path, a name or the template itself, or else from
    the model. A separate template file has priority over tokenizer_config.json. `variables` is
    --default-chat-template-kwargs.
    """
    settings = read_json(model_dir / SETTINGS)
    known = _special_tokens(settings) | _default_variables(variables)
    if given is not None:
        source, where = _given_source(given)
        return ChatTemplate(source, where=where, variables=known)
    sources, where = _model_sources(model_dir)
    if FOR_CHAT not in sources:
        return None
    return ChatTemplate(
        sources[FOR_CHAT],
        with_tools=sources.get(FOR_TOOLS),
        where=where,
        variables=known,
    )


def _default_variables(text: str) -> dict[str, Any]:
    option = "--default-chat-template-kwargs"
    found = read_object(text, option)
    for name in found.keys() & RESERVED:
        raise ConfigError(f"{option}: '{name}' is set by aserve")
    return found


def _given_source(given: str) -> tuple[str, str]:
    """Returns the template and its name for errors."""
    if any(mark in given for mark in MARKS):
        return given, "--chat-template"
    if given in TEMPLATES:
        return TEMPLATES[given], f"the template {given}"
    path = Path(given).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"--chat-template {given}: there is no such file, it is none of "
            f"{', '.join(TEMPLATES)}, and the text is not a template, which would contain one of "
            f"{' '.join(MARKS)}"
        )
    return _read(path), str(path)


def _model_sources(model_dir: Path) -> tuple[dict[str, str], str]:
    """Returns the model's templates by name, and the file that has them."""
    own = model_dir / "chat_template.jinja"
    if own.is_file():
        more = sorted((model_dir / "additional_chat_templates").glob("*.jinja"))
        return {FOR_CHAT: _read(own), **{path.stem: _read(path) for path in more}}, str(own)
    for path in (model_dir / "chat_template.json", model_dir / SETTINGS):
        found = read_json(path).get("chat_template")
        if found:
            return _by_name(found, path), str(path)
    return {}, ""


def _by_name(value: object, path: Path) -> dict[str, str]:
    """Reads the field `chat_template`, which is one template or a list of named ones."""
    items = value if isinstance(value, list) else [{"name": FOR_CHAT, "template": value}]
    named: dict[str, str] = {}
    for item in items:
        match item:
            case {"name": str(name), "template": str(source)}:
                named[name] = source
            case _:
                raise ConfigError(
                    f"{path}: chat_template must be a text or a list of objects with a name and a "
                    "template"
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
    """Returns the text of a special token, which a file has as text or as {"content": text}."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None
