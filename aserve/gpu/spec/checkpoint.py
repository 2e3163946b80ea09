"""Loads the checkpoint of a drafter: config.json and safetensors, as drafters are published.

A drafter's checkpoint is that of a decoder with less in it. Its names may lack the prefix `model.`,
and it may have no embeddings and no head of its own, which are then the target's. Integer tensors,
such as the table of a reduced vocabulary, are no weights and are read apart from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from aserve.errors import ConfigError
from aserve.gpu.kv.layer_groups import LayerSpec
from aserve.gpu.models.base import CausalModel, LoadPlan
from aserve.gpu.models.config.fields import Fields
from aserve.gpu.models.config.layer_types import (
    SLIDING,
    Windows,
    periodic_windows,
    switched_windows,
)
from aserve.gpu.models.config.model import ModelConfig, parse_config, read_fields
from aserve.gpu.models.config.quantization import quantization_of
from aserve.gpu.models.decoder import Decoder
from aserve.gpu.models.ngram_embedding import NgramModel
from aserve.gpu.models.vision_language import VisionLanguageModel
from aserve.gpu.moe.shortcut_decoder import ShortcutDecoder
from aserve.gpu.weights.checkpoint import Checkpoint
from aserve.gpu.weights.dummy import DummyWeights
from aserve.gpu.weights.inventory import Inventory, check_fit
from aserve.gpu.weights.reader import WeightReader
from aserve.gpu.weights.source import LoadProgress, WeightSource

DRAFT_PATH = "speculative_draft_model_path"
PREFIX = "model."
IN_DECODER = ("embed_tokens.", "layers.", "norm.")  # what a decoder has below the prefix
EMBEDDINGS = "model.embed_tokens"
HEAD = "lm_head"
NESTED = "transformer_layer_config"

M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """The source of a drafter's weights while it is built, and the names that its checkpoint
    has."""

    source: WeightSource
    names: frozenset[str]

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a weight of the layer `name`."""
        return f"{name}.weight" in self.names

    def has_bias(self, name: str) -> bool:
        return f"{name}.bias" in self.names

    def embeddings(self, config: ModelConfig, target: CausalModel) -> Tensor:
        """Returns the drafter's embeddings, [vocab, hidden], or else the target's."""
        if self.has(EMBEDDINGS):
            shape = (config.vocab_size, config.hidden_size)
            return self.source.tensor(f"{EMBEDDINGS}.weight", shape)
        return target_embeddings(target, config)


def read_draft_config(model_dir: Path, *, defaults: Mapping[str, object] = {}) -> ModelConfig:
    """Reads config.json. A config of the `speculators` library describes the decoder's layers in an
    object of its own. `defaults` are the drafter's values for absent fields.
    """
    file = read_fields(model_dir).merged_with(NESTED)
    return parse_config(file, defaults=defaults)


def load_draft_model(
    model_dir: Path,
    plan: LoadPlan,
    build: Callable[[DraftWeights], M],
    *,
    rename: Callable[[str], str | None],
) -> M:
    """Builds a drafter from its checkpoint, whose tensors are known by their renamed names.

    As for the target, names, shapes and memory are checked before a value is read. `build` is
    called twice, first with an `Inventory`. Dummy weights need a checkpoint as well: only its
    names are read.
    """
    target = plan.target
    stored = quantization_of(read_fields(model_dir))
    with Checkpoint(model_dir, target.device, rename=rename, quantization=stored) as checkpoint:
        names = frozenset(checkpoint.tensors)
        inventory = Inventory(plan.dtype)
        build(DraftWeights(inventory, names))
        check_fit(inventory, checkpoint)
        held_bytes = inventory.held_bytes(target.bits, checkpoint.stored_bits)
        target.check_room(held_bytes, plan.dtype)
        progress = LoadProgress(
            inventory.size_bytes, dtype=plan.dtype, on_progress=plan.on_progress
        )
        source: WeightSource
        if plan.is_dummy:
            source = DummyWeights(target, dtype=plan.dtype, progress=progress)
        else:
            source = WeightReader(checkpoint, target, dtype=plan.dtype, progress=progress)
        return build(DraftWeights(source, names))


def decoder_name(name: str) -> str:
    """The name that a decoder's layers have for a tensor of a drafter's checkpoint."""
    name = name.removeprefix(PREFIX)
    return PREFIX + name if name.startswith(IN_DECODER) else name


def read_integers(model_dir: Path, name: str, device: torch.device) -> Tensor | None:
    """Reads the integer tensor `name` as int64, or returns None if there is none."""
    with Checkpoint(model_dir, device) as checkpoint:
        if name not in checkpoint.tensors:
            return None
        stored = checkpoint.tensors[name]
        if stored.dtype not in ("I64", "I32"):
            raise ConfigError(f"{model_dir}: {name} is {stored.dtype}, and must be I64 or I32")
        return checkpoint.read(name).to(torch.int64, copy=True)


def decoder_of(target: CausalModel) -> Decoder | None:
    """Returns the decoder that the target is or has. None: it has no native code."""
    inner = target.text if isinstance(target, NgramModel | VisionLanguageModel) else target
    if isinstance(inner, ShortcutDecoder):
        return inner.decoder
    return inner if isinstance(inner, Decoder) else None


def target_embeddings(target: CausalModel, config: ModelConfig) -> Tensor:
    """Returns the target's embeddings of single ids, [vocab, hidden], for a drafter that has
    none."""
    source, decoder = config.fields.source, decoder_of(target)
    if decoder is None:
        raise ConfigError(
            f"{source}: the drafter has no embeddings of its own, and those of a model without "
            "native code cannot be shared; use a drafter whose checkpoint has them",
            param=DRAFT_PATH,
        )
    if decoder.embeddings.shape[1] != config.hidden_size:
        raise ConfigError(
            f"{source}: the drafter has no embeddings of its own, and its hidden_size "
            f"{config.hidden_size} differs from the model's, {decoder.embeddings.shape[1]}",
            param=DRAFT_PATH,
        )
    return decoder.embeddings


def embedding_factor_of(target: CausalModel) -> float:
    decoder = decoder_of(target)
    return 1.0 if decoder is None else decoder.embedding_factor


def check_vocabulary(model_dir: Path, vocab_size: int, target: CausalModel) -> None:
    if vocab_size != target.vocab_size:
        raise ConfigError(
            f"the draft model {model_dir} has {vocab_size} tokens, and the model has "
            f"{target.vocab_size}: both need the same vocabulary",
            param=DRAFT_PATH,
        )


def check_target_hidden(fields: Fields, name: str, hidden_size: int, target: CausalModel) -> None:
    """Refuses a drafter that was trained for hidden states of another size. `name` is the field of
    its config that says which."""
    if hidden_size != target.hidden_size:
        raise ConfigError(
            f"{fields.source}: {name} is {hidden_size}, but the model's hidden states have "
            f"{target.hidden_size} elements; use a drafter that was trained for this model",
            param=DRAFT_PATH,
        )


def check_layer_ids(fields: Fields, layer_ids: tuple[int, ...], target: CausalModel) -> None:
    """Refuses a drafter that reads layers which the target does not have."""
    num_layers = num_layers_of(target)
    if any(not 0 <= index < num_layers for index in layer_ids):
        raise ConfigError(
            f"{fields.source}: the drafter reads what leaves the layers {list(layer_ids)}, but the "
            f"model has the layers 0 to {num_layers - 1}",
            param=DRAFT_PATH,
        )


def num_layers_of(target: CausalModel) -> int:
    decoder = decoder_of(target)
    return len(target.layers if decoder is None else decoder.blocks)


def draft_windows(fields: Fields) -> Windows:
    """Returns the sliding window of each layer, as Llama's and Qwen's configs state them. Kinds of
    the target's layers in place of the drafter's say nothing, unless one of them slides."""
    if fields.has("layer_types") and SLIDING in fields.texts("layer_types"):
        return periodic_windows(fields, 1)
    return switched_windows(fields)


def check_windows(model_dir: Path, layers: tuple[LayerSpec, ...], target: CausalModel) -> None:
    """Refuses layers with sliding windows that the target has not: a drafter shares the target's
    page tables, which free the pages behind a window."""
    windows = {layer.window for layer in target.layers} | {None}
    if unknown := {layer.window for layer in layers} - windows:
        raise ConfigError(
            f"the draft model {model_dir} has layers with sliding windows of "
            f"{sorted(filter(None, unknown))} tokens, and the model has none of that size; use a "
            "drafter with the model's windows",
            param=DRAFT_PATH,
        )
