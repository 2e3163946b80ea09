"""Checks the files beside tokenizer.json, of a vocabulary and of special tokens, before the
libraries read them.

WHY: of such files tokenizers raises a bare Exception, and transformers whatever Python raises for a
value of another type; both name neither the file nor the value.
"""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import Any

from aserve.errors import ConfigError
from aserve.text.model_files import SETTINGS, read_json, token_text

HEAD = "#version"  # begins a line that is no merge
MAX_ID = (1 << 32) - 1  # in tokenizers, an id has 32 bits
ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")  # of special tokens
A_TOKEN = 'a text, or an object whose "content" is a text'
REPAIR = "copy the file again from where the model came from"


def check_vocabulary(model_dir: Path) -> None:
    """Raises ConfigError. Ids and merges are checked where both files of BPE are there, because
    tokenizers of other kinds have a vocab.json of their own form.
    """
    vocab = read_json(model_dir / "vocab.json")
    _read_text(model_dir / "vocab.txt")
    merges = _read_text(model_dir / "merges.txt")
    if merges and (model_dir / "vocab.json").exists():
        _check_ids(vocab, model_dir / "vocab.json")
        _check_merges(merges, vocab, model_dir / "merges.txt")


def check_special_tokens(model_dir: Path) -> None:
    """Raises ConfigError for values that transformers cannot use."""
    path = model_dir / "added_tokens.json"
    _check_ids(read_json(path), path)
    for path in (model_dir / SETTINGS, model_dir / "special_tokens_map.json"):
        _check_settings(read_json(path), path)


def _check_settings(settings: dict[str, Any], path: Path) -> None:
    for role in ROLES:
        name = f"{role}_token"
        if not _is_token(value := settings.get(name)) and value is not None:
            raise _wrong(path, name, value, expected=A_TOKEN)
    for name in ("additional_special_tokens", "extra_special_tokens"):
        value = settings.get(name)
        tokens = list(value.values()) if isinstance(value, dict) else value
        if tokens is not None and not (isinstance(tokens, list) and all(map(_is_token, tokens))):
            raise _wrong(path, name, value, expected=f"a list whose items are each {A_TOKEN}")
    name = "added_tokens_decoder"
    value = settings.get(name, {})
    if not isinstance(value, dict):
        raise _wrong(path, name, value, expected="an object of tokens by their ids")
    for token_id, token in value.items():
        if not (token_id.isdecimal() and isinstance(token, dict) and _is_token(token)):
            expected = 'an integer as the name, and an object whose "content" is a text'
            raise _wrong(path, name, {token_id: token}, expected=expected)
    if not isinstance(value := settings.get("tokenizer_class"), str | None):
        raise _wrong(path, "tokenizer_class", value, expected="a text")
    if not isinstance(value := settings.get("auto_map", {}), dict):
        raise _wrong(path, "auto_map", value, expected="an object")


def _is_token(value: object) -> bool:
    return token_text(value) is not None


def _wrong(path: Path, name: str, value: object, *, expected: str) -> ConfigError:
    found = f"{value!r}"[:100]
    return ConfigError(f"{path}: {name} is {found}; expected {expected}: {REPAIR}")


def _read_text(path: Path) -> str:
    """Returns the text of a file, or an empty one if the file does not exist."""
    try:
        return path.read_bytes().decode()
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error}") from None


def _check_ids(vocab: dict[str, object], path: Path) -> None:
    for token, token_id in vocab.items():
        is_id = type(token_id) is int and 0 <= token_id <= MAX_ID
        if not is_id:
            raise ConfigError(
                f"{path}: the id of the token {token!r} is {token_id!r}; expected an integer from "
                f"0 to {MAX_ID}: {REPAIR}"
            )


def _check_merges(text: str, vocab: Container[str], path: Path) -> None:
    for number, line in enumerate(text.removesuffix("\n").split("\n"), start=1):
        pair = line.removesuffix("\r").split(" ")
        if line.startswith(HEAD):
            continue
        if len(pair) != 2:
            raise ConfigError(
                f"{path}, line {number}: {line[:100]!r} is no merge, which is two tokens with one "
                f"space between them: {REPAIR}"
            )
        for token in (*pair, "".join(pair)):
            if token not in vocab:
                raise ConfigError(
                    f"{path}, line {number}: the token {token[:100]!r} of this merge is not in "
                    f"vocab.json; the two files belong to different models, or one is damaged: "
                    f"{REPAIR}"
                )
