"""Reads a LoRA adapter in PEFT's format: adapter_config.json and adapter_model.safetensors.

A module with weight W becomes W + s B A, with s = alpha / r, or alpha / sqrt(r) with rsLoRA
(https://arxiv.org/abs/2106.09685, https://arxiv.org/abs/2312.03732). An adapter that changes
anything else is refused, because it would silently give other results than in PEFT.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from aserve.errors import ConfigError
from aserve.gpu.models.config.fields import Fields
from aserve.gpu.weights.checkpoint import DTYPES, Rename
from aserve.gpu.weights.renamed import older_name
from aserve.json_file import read_json_object

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
TENSOR_NAME = re.compile(r"base_model\.model\.(.+)\.lora_(A|B)\.weight")
PLAIN_NAME = re.compile(r"[\w.]+")

# Initialisations that also change the model's own weights.
CHANGES_BASE = ("pissa", "olora", "corda", "loftq")
# Fields with which PEFT computes something else, and what that is.
UNSUPPORTED: Mapping[str, str] = {
    "use_dora": "DoRA, which also scales the weight's columns",
    "modules_to_save": "whole modules in place of the model's own",
    "lora_bias": "biases of the adapter's matrices",
    "fan_in_fan_out": "transposed weights",
    "layer_replication": "repeated layers",
    "target_parameters": "adapters of parameters that belong to no linear layer",
    "trainable_token_indices": "new embeddings of tokens",
    "use_qalora": "QALoRA, which pools the inputs",
    "alora_invocation_tokens": "activated LoRA, which begins at certain tokens",
}


@dataclass(frozen=True, slots=True)
class LoraModule:
    """The change of one linear layer: W + B A."""

    a: Tensor  # [rank, in]
    b: Tensor  # [out, rank], float64, with the scale in it


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    modules: Mapping[str, LoraModule]  # by the name that the model has for the layer


def read_adapter(directory: Path, *, max_rank: int, own_name: Rename = older_name) -> LoraAdapter:
    """`own_name` returns the name that the model has for a tensor of the checkpoint. Raises
    ConfigError for what is no adapter, or one that cannot be applied.
    """
    config = _read_config(directory)
    weights = _read_weights(directory / WEIGHTS)
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights.items():
        match = TENSOR_NAME.fullmatch(name)
        if match is None:
            raise ConfigError(f"{directory / WEIGHTS}: {name} is no matrix A or B of a LoRA layer")
        pairs.setdefault(match[1], {})[match[2]] = tensor
    modules: dict[str, LoraModule] = {}
    for name, pair in pairs.items():
        own = own_name(f"{name}.weight") or name
        modules[own.removesuffix(".weight")] = _module(config, name, pair, max_rank)
    return LoraAdapter(modules)


def _read_config(directory: Path) -> Fields:
    path = directory / CONFIG
    try:
        values = read_json_object(path, max_bytes=MAX_CONFIG_BYTES)
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist") from None
    fields = Fields(values, source=str(path))
    if fields.text("peft_type", default="LORA") != "LORA":
        fields.refuse("peft_type", expected="LORA, which is the only type that is supported")
    if fields.text("bias", default="none") != "none":
        fields.refuse("bias", expected="none: an adapter that changes biases is not supported")
    if str(values.get("init_lora_weights", "")).lower().startswith(CHANGES_BASE):
        fields.refuse("init_lora_weights", expected="one that leaves the model's own weights alone")
    for name, what in UNSUPPORTED.items():
        if values.get(name):
            fields.refuse(name, expected=f"none, because {what} is not supported")
    return fields


def _read_weights(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        reason = "it does not exist" if isinstance(error, FileNotFoundError) else error
        raise ConfigError(f"{path} cannot be read: {reason}") from None


def _module(config: Fields, name: str, pair: Mapping[str, Tensor], max_rank: int) -> LoraModule:
    if pair.keys() != {"A", "B"}:
        raise ConfigError(f"{config.source}: {name} has only one of the matrices A and B")
    a, b = pair["A"], pair["B"]
    rank = _pattern_value(config, "rank_pattern", name) or config.integer("r")
    if a.ndim != 2 or b.ndim != 2 or len(a) != rank or b.shape[1] != rank:
        shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
        raise ConfigError(
            f"{config.source}: {name} has matrices {shapes}, but its rank is {rank:g}"
        )
    if rank > max_rank:
        raise ConfigError(
            f"{config.source}: {name} has rank {rank:g}, and the server was started with "
            f"--max-lora-rank {max_rank}"
        )
    for tensor in (a, b):
        if tensor.dtype not in DTYPES.values():
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise ConfigError(
                f"{config.source}: {name} has weights of a type that is not read: {dtype}"
            )
    if not (a.isfinite().all() and b.isfinite().all()):
        raise ConfigError(f"{config.source}: {name} has weights that are not finite")
    alpha = _pattern_value(config, "alpha_pattern", name) or config.number("lora_alpha")
    root = math.sqrt(rank) if config.flag("use_rslora") else rank
    return LoraModule(a, b.double() * (alpha / root))


def _pattern_value(config: Fields, field: str, name: str) -> float | None:
    """Returns the value of the first key that is the module's name, or the end of it after a dot.
    PEFT's keys are regular expressions; those that are not plain names are refused.
    """
    patterns = config.section(field)
    for key in patterns.names:
        plain = key.replace("\\.", ".").removeprefix("^").removesuffix("$")
        if not PLAIN_NAME.fullmatch(plain):
            patterns.refuse(key, expected="the key to be a module's name, no regular expression")
        if name == plain or name.endswith(f".{plain}"):
            return patterns.number(key)
    return None
