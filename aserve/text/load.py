"""The text side of a model directory: tokenizer, the ids that end an answer, chat template.

Must not know requests. Reads files, so it runs before the loop is busy, or in a thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from aserve.errors import ConfigError
from aserve.text.numeric import numeric_tokenizer
from aserve.text.template import ChatTemplate
from aserve.text.tokenizer import TextTokenizer

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


class _TokenizerFile(msgspec.Struct):
    """As much of tokenizer.json as tells that it is one, before tokenizers sees it."""

    model: msgspec.Raw


def load_tokenizer(model_dir: Path) -> TextTokenizer:
    settings = _read_json(model_dir / "tokenizer_config.json")
    backend = _load_backend(model_dir)
    bos_id = None
    if settings.get("add_bos_token") is True:
        bos_id = _token_id(backend, settings.get("bos_token"))
    eos_id = _token_id(backend, settings.get("eos_token"))
    return TextTokenizer(backend, eos_ids=_eos_ids(model_dir, eos_id), bos_id=bos_id)


def has_tokenizer(model_dir: Path) -> bool:
    return any((model_dir / name).is_file() for name in TOKENIZER_FILES)


def load_numeric_tokenizer(model_dir: Path) -> TextTokenizer:
    """For a directory that has a configuration and no tokenizer."""
    path = model_dir / "config.json"
    config = _read_json(path)
    vocab_size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    if not isinstance(vocab_size, int):
        raise ConfigError(f"{path}: vocab_size is {vocab_size!r}; expected an integer")
    return numeric_tokenizer(vocab_size, eos_ids=_eos_ids(model_dir))


def load_template(model_dir: Path) -> ChatTemplate | None:
    """A template in a file of its own wins over the one in the tokenizer's settings."""
    settings = _read_json(model_dir / "tokenizer_config.json")
    source = _template_source(model_dir, settings)
    if source is None:
        return None
    return ChatTemplate(source, special_tokens=_special_tokens(settings))


def _load_backend(model_dir: Path) -> Tokenizer:
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        return _convert_backend(model_dir)
    data = path.read_bytes()
    try:
        msgspec.json.decode(data, type=_TokenizerFile)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    return Tokenizer.from_buffer(data)


def _convert_backend(model_dir: Path) -> Tokenizer:
    """For SentencePiece models without tokenizer.json; importing transformers takes seconds."""
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"{model_dir}: no usable tokenizer: {error}") from error
    backend = loaded.backend_tokenizer
    if not isinstance(backend, Tokenizer):
        raise ConfigError(f"{model_dir}: its tokenizer has no fast form; save it as tokenizer.json")
    return backend


def _eos_ids(model_dir: Path, of_tokenizer: int | None = None) -> list[int]:
    """Chat models name their ends in different files, not always in all: every one counts."""
    config = _read_json(model_dir / "config.json")
    named = [
        _read_json(model_dir / "generation_config.json").get("eos_token_id"),
        config.get("eos_token_id"),
        config.get("text_config", {}).get("eos_token_id"),
        of_tokenizer,
    ]
    ids = [i for value in named for i in (value if isinstance(value, list) else [value])]
    return list(dict.fromkeys(i for i in ids if isinstance(i, int)))


def _token_id(backend: Tokenizer, token: object) -> int | None:
    content = _token_text(token)
    return None if content is None else backend.token_to_id(content)


def _token_text(token: object) -> str | None:
    """A special token is written as its text or as an object with its `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    texts = {
        name: _token_text(value) for name, value in settings.items() if name.endswith("_token")
    }
    return {name: text for name, text in texts.items() if text is not None}


def _template_source(model_dir: Path, settings: dict[str, Any]) -> str | None:
    file = model_dir / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    in_json = _read_json(model_dir / "chat_template.json").get("chat_template")
    return _default_template(in_json) or _default_template(settings.get("chat_template"))


def _default_template(value: object) -> str | None:
    """One template, or a list of named ones of which `default` is for plain chat."""
    if isinstance(value, list):
        return next(_default_templates(value), None)
    return value if isinstance(value, str) else None


def _default_templates(named: list[Any]) -> Iterator[str]:
    for item in named:
        if isinstance(item, dict) and item.get("name") == "default":
            yield item["template"]


def _read_json(path: Path) -> dict[str, Any]:
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
