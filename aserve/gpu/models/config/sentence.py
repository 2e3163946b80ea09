"""Reads how sentence-transformers turns hidden states into an embedding, from the files beside the
checkpoint: modules.json, the configurations of its Pooling and Dense modules, and
sentence_bert_config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from aserve.errors import ConfigError
from aserve.gpu.models.config.fields import Fields
from aserve.gpu.models.pooling import PoolingMode
from aserve.json_file import read_json_file, read_json_object

MODULES = "modules.json"
LENGTHS = "sentence_bert_config.json"
SUPPORTED = ("Transformer", "Pooling", "Dense", "Normalize")  # in this order
ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "Sigmoid")  # of torch.nn
MODES: Mapping[str, PoolingMode] = {"cls_token": "cls", "mean_tokens": "mean", "lasttoken": "last"}
NEWER_MODES: Mapping[str, PoolingMode] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
PREFIX = "pooling_mode_"


@dataclass(frozen=True, slots=True)
class DenseModule:
    """`f(W x + b)`, whose weights are in a directory of their own."""

    directory: Path
    in_features: int
    out_features: int
    has_bias: bool
    activation: str  # one of ACTIVATIONS


@dataclass(frozen=True, slots=True)
class SentencePooling:
    mode: PoolingMode
    has_unit_length: bool
    max_len: int | None = None  # that the texts were cut to in training
    dense: tuple[DenseModule, ...] = ()


def read_sentence_pooling(model_dir: Path) -> SentencePooling | None:
    """Returns None for a model without modules.json. Refuses modules that are not supported."""
    path = model_dir / MODULES
    if not path.is_file():
        return None
    modules = [Fields(each, source=str(path)) for each in _listed(path)]
    kinds = [each.text("type").rpartition(".")[2] for each in modules]
    for module, kind in zip(modules, kinds, strict=True):
        if kind not in SUPPORTED:
            module.refuse("type", expected=f"a module of the kinds {', '.join(SUPPORTED)}")
    if kinds != sorted(kinds, key=SUPPORTED.index):
        raise ConfigError(f"{path}: its modules are not in the order {', '.join(SUPPORTED)}")
    if "Pooling" not in kinds:
        raise ConfigError(f"{path}: there is no module of the kind Pooling")
    folder = modules[kinds.index("Pooling")].text("path")
    lengths = model_dir / LENGTHS
    max_len = None
    if lengths.is_file():
        fields = Fields(_read(lengths), source=str(lengths))
        max_len = fields.integer("max_seq_length") if fields.has("max_seq_length") else None
    mode = _mode(model_dir / folder / "config.json")
    dense = [
        _dense(model_dir / module.text("path"))
        for module, kind in zip(modules, kinds, strict=True)
        if kind == "Dense"
    ]
    return SentencePooling(mode, "Normalize" in kinds, max_len, tuple(dense))


def _mode(path: Path) -> PoolingMode:
    fields = Fields(_read(path), source=str(path))
    if not fields.flag("include_prompt", default=True):
        fields.refuse("include_prompt", expected="true: the tokens of a prompt are pooled, too")
    known = MODES
    if fields.has("pooling_mode"):  # in newer files
        known, asked = NEWER_MODES, [fields.text("pooling_mode")]
    else:
        flags = [name for name in fields.names if name.startswith(PREFIX)]
        asked = [name.removeprefix(PREFIX) for name in flags if fields.flag(name)]
    if len(asked) != 1 or asked[0] not in known:
        found = ", ".join(asked) or "none"
        raise ConfigError(
            f"{path}: the pooling mode is {found}; expected one of {', '.join(known)}"
        )
    return known[asked[0]]


def _dense(directory: Path) -> DenseModule:
    path = directory / "config.json"
    fields = Fields(_read(path), source=str(path))
    activation = fields.text("activation_function", default="Tanh").rpartition(".")[2]
    if activation not in ACTIVATIONS:
        fields.refuse("activation_function", expected=f"one of {', '.join(ACTIVATIONS)}")
    return DenseModule(
        directory,
        fields.integer("in_features"),
        fields.integer("out_features"),
        fields.flag("bias", default=True),
        activation,
    )


def _listed(path: Path) -> list[Mapping[str, object]]:
    modules = read_json_file(path)
    if not isinstance(modules, list) or not all(isinstance(each, dict) for each in modules):
        raise ConfigError(f"{path} holds no list of modules")
    return modules


def _read(path: Path) -> Mapping[str, object]:
    try:
        return read_json_object(path)
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist") from None
