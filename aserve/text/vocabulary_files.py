"""Checks the files of a BPE or WordPiece vocabulary before the library reads them.

WHY: of such files tokenizers raises a bare Exception, which names neither the file nor the value.
"""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path

from aserve.errors import ConfigError
from aserve.text.model_files import read_json

HEAD = "#version"  # begins a line that is no merge
MAX_ID = (1 << 32) - 1  # in tokenizers, an id has 32 bits
REPAIR = "copy the file again from where the model came from"


def check_vocabulary(model_dir: Path) -> None:
    """Raises ConfigError. Ids and merges are checked where both files of BPE are there, because
    tokenizers of other kinds have a vocab.json of their own form.
    """
    vocab = read_json(model_dir / "vocab.json")
    _read_text(model_dir / "vocab.txt")
    merges = _read_text(model_dir / "merges.txt")
    if vocab and merges:
        _check_ids(vocab, model_dir / "vocab.json")
        _check_merges(merges, vocab, model_dir / "merges.txt")


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
