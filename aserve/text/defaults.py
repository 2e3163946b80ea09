"""Reads the default sampling parameters from a model's generation_config.json.

As in vLLM, `do_sample` is ignored: greedy sampling is temperature 0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from aserve.errors import ConfigError
from aserve.messages.base import Record
from aserve.text.model_files import read_json

FILE = "generation_config.json"


class GenerationDefaults(Record, frozen=True):
    """The default sampling parameters, named as in the file. `max_new_tokens` is the default of
    max_tokens; None means the rest of the context.
    """

    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=-1)] = 0
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, msgspec.Meta(ge=0.01, le=100)] = 1.0
    max_new_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None

    def __str__(self) -> str:
        """The values that differ from NEUTRAL, for a log line."""
        return " ".join(
            f"{name}={value}"
            for name, value in msgspec.structs.asdict(self).items()
            if value != getattr(NEUTRAL, name)
        )


NEUTRAL = GenerationDefaults()


def load_defaults(model_dir: Path) -> GenerationDefaults:
    path = model_dir / FILE
    content = read_json(path)
    known = {name: content.get(name) for name in GenerationDefaults.__struct_fields__}
    given = {name: value for name, value in known.items() if value is not None}
    try:
        return msgspec.convert(given, GenerationDefaults)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}; --generation-config none ignores the file") from None
