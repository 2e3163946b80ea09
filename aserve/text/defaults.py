"""Sampling parameters that depend on the model: its defaults, and the token ids of bad words and of
the tags around reasoning.

The defaults come from generation_config.json. As in vLLM, `do_sample` is ignored: greedy sampling
is temperature 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from aserve.errors import ConfigError, InvalidRequest
from aserve.messages.base import MAX_INT32, Record, pack_i32
from aserve.messages.requests import ReasoningIds, ReasoningParams
from aserve.parsers.registry import opens_reasoning, reasoning_tags
from aserve.text.model_files import read_json, read_object

if TYPE_CHECKING:
    from aserve.text.tokenizer import TextTokenizer

FILE = "generation_config.json"
MAX_BAD_WORD_IDS = 2048  # token ids of all words of a request together
MAX_PREDICTION_TOKENS = 16_384


class GenerationDefaults(Record, frozen=True):
    """The default sampling parameters, named as in the file. `max_new_tokens` is the default of
    max_tokens; None means the rest of the context.
    """

    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=MAX_INT32)] = 0
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, msgspec.Meta(ge=0.01, le=100)] = 1.0
    max_new_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_INT32)] | None = None

    def __str__(self) -> str:
        """Returns the values that differ from NEUTRAL, for a log line."""
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
    given = {name: _whole(value) for name, value in known.items() if value is not None}
    try:
        return msgspec.convert(given, GenerationDefaults)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}; --generation-config none ignores the file") from None


def _whole(value: object) -> object:
    """Some files have 50.0 where an integer is meant, as it is in Python's arithmetic."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def overridden(defaults: GenerationDefaults, text: str) -> GenerationDefaults:
    """Returns the defaults with those of --override-generation-config."""
    option = "--override-generation-config"
    given = read_object(text, option)
    for name in given.keys() - {*defaults.__struct_fields__}:
        known = ", ".join(defaults.__struct_fields__)
        raise ConfigError(f"{option}: '{name}' is no parameter; there are {known}")
    try:
        return msgspec.convert(msgspec.structs.asdict(defaults) | given, GenerationDefaults)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{option}: {error}") from None


def bad_word_ids(words: Iterable[str], tokenizer: TextTokenizer) -> tuple[tuple[int, ...], ...]:
    """Encodes each word as at the start of a text and as after a space, like vLLM. The second form
    is left out if it ends in the tokens of the first.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        plain = _word_ids(word.lstrip(), tokenizer)
        if not plain:
            raise InvalidRequest(
                "Invalid 'bad_words': a word is empty.",
                param="bad_words",
                code="string_below_min_length",
            )
        found[plain] = None
        spaced = _word_ids(f" {word.lstrip()}", tokenizer)
        if spaced[-len(plain) :] != plain:
            found[spaced] = None
    num_ids = sum(map(len, found))
    if num_ids > MAX_BAD_WORD_IDS:
        raise InvalidRequest(
            f"Invalid 'bad_words': they have {num_ids} tokens in total, more than "
            f"{MAX_BAD_WORD_IDS}.",
            param="bad_words",
            code="array_above_max_length",
        )
    return tuple(found)


def prediction_ids(text: str, tokenizer: TextTokenizer) -> bytes:
    """Encodes the text that the client predicts for the output, as int32."""
    if not text:
        return b""
    limit = MAX_PREDICTION_TOKENS
    is_long = len(text) > limit * tokenizer.bytes_per_token
    if is_long or len(ids := tokenizer.encode(text, with_special=False)) > limit:
        raise InvalidRequest(
            f"Invalid 'prediction': it has more than {limit} tokens; send the part of the text "
            "that the answer begins with.",
            param="prediction",
            code="string_above_max_length",
        )
    return pack_i32(ids)


def reasoning_ids(
    params: ReasoningParams | None, prompt_tail: str, tokenizer: TextTokenizer
) -> ReasoningIds | None:
    """Encodes the tags. `prompt_tail` is the end of the prompt's text, which may open reasoning."""
    if params is None:
        return None
    opens, closes = (
        tuple(_word_ids(tag, tokenizer) for tag in tags)
        for tags in reasoning_tags(params.parser, params.tool_parser)
    )
    is_open = opens_reasoning(prompt_tail, params.parser)
    return ReasoningIds(opens, closes, is_open, params.max_tokens)


def _word_ids(text: str, tokenizer: TextTokenizer) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, with_special=False))
