"""Reads the JSON files of a model directory as leniently as Python's own decoder, with which
transformers reads them: a byte order mark, NaN and Infinity are allowed. Errors name the file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from aserve.errors import ConfigError


def read_json_object(path: Path, *, max_bytes: int = -1) -> dict[str, Any]:
    """Returns the object of a file, of which `max_bytes` are read. Raises FileNotFoundError, and
    ConfigError for what is none.
    """
    value = read_json_file(path, max_bytes=max_bytes)
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return value


def read_json_file(path: Path, *, max_bytes: int = -1) -> object:
    """Returns the value of a file; it raises as `read_json_object` does."""
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes)
        value: object = json.loads(data)
        if b"\\ud" in data.lower():  # an escape may stand for half a character
            json.dumps(value, ensure_ascii=False).encode()
    except FileNotFoundError:
        raise
    except RecursionError:
        raise ConfigError(f"{path} cannot be read: its values are nested too deeply") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path} cannot be read: {reason}") from None
    return value


def texts_in(value: object) -> list[str]:
    """Returns the texts of a list, which is empty for a value of another kind."""
    if not isinstance(value, list):
        return []
    return [item for item in value if isinstance(item, str)]
