"""One JSON object of a model directory.

Must not know which. Errors name the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from aserve.errors import ConfigError


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
