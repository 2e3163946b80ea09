"""The text side of models that answer a prompt with one vector: the prompts that are put before a
text, the names of labels, the activation of scores, and the encoding of pairs of texts.

It reads config.json and the files of sentence-transformers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
from tokenizers import Tokenizer

from aserve.errors import ConfigError, InvalidRequest
from aserve.json_file import texts_in
from aserve.messages.base import ArrayF32
from aserve.text.model_files import read_json
from aserve.text.text_size import encodings

MAX_SHOWN = 100  # characters of input in a message
PROMPTS = "config_sentence_transformers.json"
Activation: TypeAlias = Literal["identity", "sigmoid", "softmax"]
EncodePair: TypeAlias = Callable[[str, str, int], list[int]]
PROBLEMS: Mapping[str, Activation] = {
    "regression": "identity",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}


class _Prompts(msgspec.Struct):
    """The file's fields: prompts by name, and the name of the one that is used by default."""

    prompts: dict[str, str] = {}
    default_prompt_name: str | None = None


@dataclass(frozen=True, slots=True)
class PoolingTexts:
    """`labels` are in the order of the scores. `activation` turns scores into probabilities; it is
    None where that depends on their number. `affixes` counts the tokens that the tokenizer puts
    before a text and behind it. `encode_pair` returns the ids of two texts for a cross-encoder, at
    most as many as its last argument says.
    """

    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    labels: tuple[str, ...] = ()
    activation: Activation | None = None
    affixes: tuple[int, int] = (0, 0)
    encode_pair: EncodePair | None = None

    def prompt(self, name: str | None) -> str:
        """Returns the text that goes before a text to embed."""
        if name is None:
            return self.default_prompt
        if name not in self.prompts:
            known = ", ".join(self.prompts) or "none"
            name = name[:MAX_SHOWN]
            raise InvalidRequest(
                f"Invalid 'prompt_name': {name!r} is not a prompt of this model; it has {known}.",
                param="prompt_name",
                code="invalid_value",
            )
        return self.prompts[name]

    def activated(self, scores: ArrayF32) -> ArrayF32:
        """scores [labels] -> the same shape. By default one label has a sigmoid, and several have
        a softmax."""
        activation = self.activation or ("sigmoid" if len(scores) == 1 else "softmax")
        match activation:
            case "identity":
                return scores
            case "sigmoid":
                probabilities: ArrayF32 = 1 / (1 + np.exp(-scores.clip(-80)))
                return probabilities
            case "softmax":
                powers: ArrayF32 = np.exp(scores - scores.max())
                shares: ArrayF32 = powers / powers.sum()
                return shares

    def label(self, index: int) -> str:
        return self.labels[index] if index < len(self.labels) else f"LABEL_{index}"


PLAIN = PoolingTexts()


def load_pooling(model_dir: Path, backend: Tokenizer) -> PoolingTexts:
    config = read_json(model_dir / "config.json")
    path = model_dir / PROMPTS
    try:
        prompts = msgspec.convert(read_json(path), _Prompts)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from None
    default = prompts.default_prompt_name
    if default is not None and default not in prompts.prompts:
        raise ConfigError(f"{path}: default_prompt_name {default!r} is not one of its prompts")
    return PoolingTexts(
        prompts.prompts,
        "" if default is None else prompts.prompts[default],
        _labels(config),
        _activation(config),
        _affixes(backend),
        functools.partial(_encode_pair, backend, _segment_size(config)),
    )


def _labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    names = config.get("id2label")
    if not isinstance(names, dict) or not all(str(key).isdigit() for key in names):
        return ()
    return tuple(str(names[key]) for key in sorted(names, key=int))


def _activation(config: Mapping[str, Any]) -> Activation | None:
    """Cross-encoders of sentence-transformers name a class of torch. A reward has no activation."""
    own = config.get("sentence_transformers")
    newer = own.get("activation_fn") if isinstance(own, dict) else None
    name = newer or config.get("sbert_ce_default_activation_function")
    if isinstance(name, str):
        return "identity" if name.endswith("Identity") else "sigmoid"
    if any(name.endswith("RewardModel") for name in texts_in(config.get("architectures"))):
        return "identity"
    return PROBLEMS.get(str(config.get("problem_type")))


def _affixes(backend: Tokenizer) -> tuple[int, int]:
    """Counts the special tokens around one token."""
    mask = encodings(backend, ["a"], with_special=True)[0].special_tokens_mask
    if 0 not in mask:
        return 0, 0
    return mask.index(0), mask[::-1].index(0)


def _segment_size(config: Mapping[str, Any]) -> int:
    """Returns by how much the ids of the second segment are larger; 0 for a model without
    segments (gpu/models/encoder.py)."""
    num_segments = config.get("type_vocab_size", 2 if config.get("model_type") == "bert" else 1)
    size = config.get("vocab_size")
    has_segments = isinstance(num_segments, int) and num_segments > 1
    return size if isinstance(size, int) and has_segments else 0


def _encode_pair(
    backend: Tokenizer, segment_size: int, first: str, second: str, max_len: int
) -> list[int]:
    """Adds the special tokens of a pair. The longer text loses its end until both have `max_len`
    tokens together, as in transformers."""
    one, other = encodings(backend, [first, second], with_special=False)
    room = max(0, max_len - backend.num_special_tokens_to_add(is_pair=True))
    shorter, longer = sorted((one, other), key=lambda each: len(each.ids))
    if len(one.ids) + len(other.ids) > room:
        longer.truncate(max(room - len(shorter.ids), (room + 1) // 2))
        shorter.truncate(min(len(shorter.ids), room // 2))
    pair = backend.post_process(one, other)
    return [
        token_id + segment_size * segment
        for token_id, segment in zip(pair.ids, pair.type_ids, strict=True)
    ]
