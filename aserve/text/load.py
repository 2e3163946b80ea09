"""Loads the text side of a model directory: tokenizer, end tokens, chat template and defaults.

It reads files, so it runs in a thread or before the loop is busy.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import tokenizers
from tokenizers import Regex, Tokenizer
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

from aserve.config import ModelOptions
from aserve.errors import UNDECODABLE, ConfigError, InvalidRequest
from aserve.messages.base import MAX_INT32
from aserve.parsers.registry import (
    NO_PARSERS,
    REASONING_PARSERS,
    TOOL_PARSERS,
    ParserNames,
    families_of,
    parser_name,
)
from aserve.pictures.settings import PictureSettings, picture_settings
from aserve.text.defaults import NEUTRAL, GenerationDefaults, load_defaults, overridden
from aserve.text.model_files import load_template, read_json, token_text
from aserve.text.pooling import PLAIN, PoolingTexts, load_pooling
from aserve.text.template import ChatTemplate
from aserve.text.tokenizer import TextTokenizer, numeric_template, numeric_tokenizer
from aserve.text.vocabulary_files import check_special_tokens, check_vocabulary

logger = logging.getLogger(__name__)

GGUF = "model.gguf"  # whose metadata have the tokenizer
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", GGUF)


class _TokenizerFile(msgspec.Struct):
    """The part of tokenizer.json that is checked before tokenizers reads the file."""

    model: msgspec.Raw


class TextSide(NamedTuple):
    """The parts of a model that handle text."""

    tokenizer: TextTokenizer
    template: ChatTemplate | None = None
    defaults: GenerationDefaults = NEUTRAL
    parsers: ParserNames = NO_PARSERS
    pooling: PoolingTexts = PLAIN
    pictures: PictureSettings | None = None


def load_text(model_dir: Path, options: ModelOptions) -> TextSide:
    own = NEUTRAL if options.generation_config == "none" else load_defaults(model_dir)
    defaults = overridden(own, options.override_generation_config)
    if defaults != NEUTRAL:
        logger.info("defaults of %s: %s", model_dir, defaults)
    text_dir = _text_dir(model_dir, options)
    template = load_template(
        text_dir, options.chat_template, variables=options.default_chat_template_kwargs
    )
    parsers = choose_parsers(template, options)
    logger.info("parsers of %s: reasoning=%s tools=%s", model_dir, parsers.reasoning, parsers.tools)
    if options.load_format != "dummy" or has_tokenizer(text_dir):
        backend = _load_backend(text_dir)
        tokenizer = _tokenizer_of(backend, text_dir, model_dir)
        pooling = load_pooling(model_dir, backend)
        pictures = None
        if options.model_impl != "transformers":
            pictures = load_pictures(model_dir, backend)
        return TextSide(tokenizer, template, defaults, parsers, pooling, pictures)
    logger.info("%s has no tokenizer: texts are token ids as decimal numbers", model_dir)
    return TextSide(load_numeric_tokenizer(model_dir), template or numeric_template(), defaults)


def _text_dir(model_dir: Path, options: ModelOptions) -> Path:
    """Returns the directory of the tokenizer and the chat template."""
    if options.tokenizer is None:
        return model_dir
    text_dir = Path(options.tokenizer).expanduser()
    if not has_tokenizer(text_dir):
        raise ConfigError(
            f"--tokenizer {options.tokenizer}: a directory with one of "
            f"{', '.join(TOKENIZER_FILES)} is expected"
        )
    return text_dir


def load_pictures(model_dir: Path, backend: Tokenizer) -> PictureSettings | None:
    """NOTE: newer checkpoints have the settings of pictures in those of the whole processor."""
    whole = read_json(model_dir / "processor_config.json").get("image_processor")
    processor = read_json(model_dir / "preprocessor_config.json")
    return picture_settings(
        read_json(model_dir / "config.json"),
        processor or (whole if isinstance(whole, dict) else {}),
        where=str(model_dir),
        token_id=backend.token_to_id,
    )


def choose_parsers(template: ChatTemplate | None, options: ModelOptions) -> ParserNames:
    """Returns the parsers that the options name; `auto` takes those that fit the template."""
    reasoning, tools = (None, None) if template is None else families_of(template.source)
    return ParserNames(
        _parser_of(options.reasoning_parser, reasoning, REASONING_PARSERS, "--reasoning-parser"),
        _parser_of(options.tool_call_parser, tools, TOOL_PARSERS, "--tool-call-parser"),
        functools.partial(_prompt_end, template),
    )


def _prompt_end(template: ChatTemplate | None, variables: Mapping[str, Any]) -> str:
    """Returns the end of the prompt of a short chat, or nothing if the template rejects it."""
    if template is None:
        return ""
    try:
        return template.render([{"role": "user", "content": "."}], variables=variables)
    except InvalidRequest:
        return ""


def _parser_of(given: str, fitting: str | None, known: Collection[str], option: str) -> str | None:
    if given in ("auto", "none"):
        return fitting if given == "auto" else None
    name = parser_name(given)
    if name not in known:
        raise ConfigError(
            f"{option} is {given!r}; expected auto, none or one of {', '.join(known)}"
        )
    return name


def load_tokenizer(model_dir: Path) -> TextTokenizer:
    return _tokenizer_of(_load_backend(model_dir), model_dir, model_dir)


def _tokenizer_of(backend: Tokenizer, text_dir: Path, model_dir: Path) -> TextTokenizer:
    settings = read_json(text_dir / "tokenizer_config.json")
    bos_id = None
    if settings.get("add_bos_token") is True:
        bos_id = _token_id(backend, settings.get("bos_token"))
    eos_id = _token_id(backend, settings.get("eos_token"))
    return TextTokenizer(backend, eos_ids=_eos_ids(model_dir, eos_id), bos_id=bos_id)


def has_tokenizer(model_dir: Path) -> bool:
    return any((model_dir / name).is_file() for name in TOKENIZER_FILES)


def load_numeric_tokenizer(model_dir: Path) -> TextTokenizer:
    """Makes a numeric tokenizer for a directory that has a configuration but no tokenizer."""
    path = model_dir / "config.json"
    config = read_json(path)
    vocab_size = _vocab_size(config)
    if not isinstance(vocab_size, int):
        raise ConfigError(f"{path}: vocab_size is {vocab_size!r}; expected an integer")
    return numeric_tokenizer(vocab_size, eos_ids=_eos_ids(model_dir))


def _load_backend(model_dir: Path) -> Tokenizer:
    """Reads the tokenizer. Some files ask for a fixed length, to which texts would be cut or padded
    unseen."""
    backend = _read_backend(model_dir)
    backend.no_padding()
    backend.no_truncation()
    return backend


def _read_backend(model_dir: Path) -> Tokenizer:
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        return _convert_backend(model_dir)
    try:
        data = path.read_bytes()
        msgspec.json.decode(data, type=_TokenizerFile)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except UNDECODABLE as error:
        raise ConfigError(f"{path}: {error}") from error
    try:
        return Tokenizer.from_buffer(data)
    except ValueError as error:
        raise ConfigError(
            f"{path} cannot be read by tokenizers {tokenizers.__version__}: {error}; a newer "
            "version of that package may have written it"
        ) from error


def _convert_backend(model_dir: Path) -> Tokenizer:
    """Converts another tokenizer format, such as SentencePiece, with transformers. PERF: its import
    takes seconds.
    """
    check_vocabulary(model_dir)
    check_special_tokens(model_dir)
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    is_gguf = (model_dir / GGUF).is_file()
    kind, file = (PreTrainedTokenizerFast, GGUF) if is_gguf else (AutoTokenizer, None)
    try:
        loaded = kind.from_pretrained(
            str(model_dir), gguf_file=file, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, ImportError) as error:
        if "auto_map" in read_json(model_dir / "tokenizer_config.json"):
            raise ConfigError(
                f"{model_dir}: no usable tokenizer: its code is in the model's directory (auto_map "
                "in tokenizer_config.json), and such code is never run. Save the tokenizer as "
                "tokenizer.json, or take a version of the model that has one"
            ) from None
        raise ConfigError(f"{model_dir}: no usable tokenizer: {error}") from error
    except (AttributeError, LookupError, StrictDataclassError, TypeError) as error:
        raise ConfigError(
            f"{model_dir}: transformers cannot read the tokenizer, because a value in config.json, "
            f"tokenizer_config.json or special_tokens_map.json is of another type than it expects "
            f"({type(error).__name__}: {error}); copy these files again from where the model came "
            "from, or save the tokenizer as tokenizer.json"
        ) from error
    backend = loaded.backend_tokenizer
    if not isinstance(backend, Tokenizer):
        raise ConfigError(
            f"{model_dir}: the tokenizer is not a fast one; save it as tokenizer.json"
        )
    if is_gguf:
        _set_pre_tokenizer(backend, model_dir)
        _keep(backend, model_dir / "tokenizer.json")
    return backend


def _set_pre_tokenizer(backend: Tokenizer, model_dir: Path) -> None:
    """Gives a byte-level BPE tokenizer the pre-tokenizer that a GGUF file names."""
    named = read_json(model_dir / "tokenizer_config.json").get("pre_tokenizer")
    if named is None:
        return
    if "patterns" not in named:
        raise ConfigError(
            f"{model_dir / GGUF}: tokenizer.ggml.pre is {named['name']!r}, and how it cuts texts "
            "into words is not known here; --tokenizer takes the tokenizer of the original model"
        )
    patterns = [Split(Regex(pattern), "isolated") for pattern in named["patterns"]]
    in_bytes = ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = Sequence([*patterns, in_bytes])
    backend.model.ignore_merges = named["ignores_merges"]


def _keep(backend: Tokenizer, path: Path) -> None:
    """Writes the tokenizer of a GGUF file to its directory in the cache, for later starts."""
    with contextlib.suppress(OSError), tempfile.NamedTemporaryFile(dir=path.parent) as made:
        made.write(backend.to_str().encode())
        made.flush()
        os.link(made.name, path)


def _eos_ids(model_dir: Path, tokenizer_eos_id: int | None = None) -> list[int]:
    """Returns the end tokens of all files, because chat models list them in different ones. Those
    that the model does not have, such as -1, are left out."""
    config = read_json(model_dir / "config.json")
    named = [
        read_json(model_dir / "generation_config.json").get("eos_token_id"),
        config.get("eos_token_id"),
        _text_config(config).get("eos_token_id"),
        tokenizer_eos_id,
    ]
    ids = [i for value in named for i in (value if isinstance(value, list) else [value])]
    size = _vocab_size(config)
    known = range(size if isinstance(size, int) else MAX_INT32 + 1)
    return list(dict.fromkeys(i for i in ids if isinstance(i, int) and i in known))


def _vocab_size(config: Mapping[str, Any]) -> object:
    return config.get("vocab_size", _text_config(config).get("vocab_size"))


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the settings of the text part. What is no object is refused when the model is
    built."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else {}


def _token_id(backend: Tokenizer, token: object) -> int | None:
    content = token_text(token)
    return None if content is None else backend.token_to_id(content)
