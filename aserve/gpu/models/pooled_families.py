"""The families of models that answer a prompt with one vector: encoders and decoders, with or
without a head that scores labels.

A family of models without a head takes its pooling from the files of sentence-transformers, if the
directory has them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from torch import Tensor, nn
from torch.nn import functional

from aserve.errors import ConfigError
from aserve.gpu.layers.linear import LinearOp
from aserve.gpu.models.base import CausalModel
from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.models.config.sentence import DenseModule, SentencePooling
from aserve.gpu.models.decoder import Decoder
from aserve.gpu.models.decoder_spec import DecoderSpec
from aserve.gpu.models.pooling import PooledModel, Pooler, PoolingHead, PoolingMode
from aserve.gpu.weights.checkpoint import Checkpoint
from aserve.gpu.weights.source import WeightSource

CLS = SentencePooling("cls", has_unit_length=True)
LAST = SentencePooling("last", has_unit_length=True)
ENCODER_PREFIXES = ("bert.", "model.", "roberta.")
# The first layer of a classification head, and of a head of other tasks.
HEADS = ("head.", "pooler.")
# Positions that follow from the configuration, and heads of other tasks.
UNUSED = ("embeddings.position_ids", "cls.", "decoder.", "lm_head.", *HEADS)


class MakeHead(Protocol):
    def __call__(self, config: ModelConfig, weights: WeightSource, num_labels: int) -> PoolingHead:
        """Builds the head that scores labels: [rows, hidden] -> [rows, labels]."""


class AnyEncoderSpec(Protocol):
    """Says how a bidirectional encoder is built."""

    @property
    def max_model_len(self) -> int: ...

    @property
    def head_pooling(self) -> PoolingMode:
        """Names the hidden state that a classifier's head gets."""

    def build(self, weights: WeightSource, *, max_model_len: int) -> CausalModel: ...


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    """Models of a bidirectional encoder."""

    name: str
    about: str
    spec: Callable[[ModelConfig], AnyEncoderSpec]
    defaults: Mapping[str, object]
    make_head: MakeHead | None = None
    pooling: SentencePooling = CLS

    def build(
        self, config: ModelConfig, weights: WeightSource, *, max_model_len: int
    ) -> PooledModel:
        spec, pooling = self.spec(config), self.pooling
        encoder = spec.build(weights, max_model_len=max_model_len)
        if self.make_head is not None:
            pooling = dataclasses.replace(pooling, mode=spec.head_pooling)
        return _pooled(
            encoder, config, weights, make_head=self.make_head, pooling=pooling, is_causal=False
        )

    def own_name(self, name: str) -> str | None:
        """Returns the tensor's name without the prefix of a model with a head. Old files have other
        names for the vectors of norms."""
        for prefix in ENCODER_PREFIXES:
            name = name.removeprefix(prefix)
        name = name.replace("LayerNorm.gamma", "LayerNorm.weight")
        name = name.replace("LayerNorm.beta", "LayerNorm.bias")
        if name.startswith(HEADS) and self.make_head is not None:
            return name
        return None if name.startswith(UNUSED) else name

    def context_len(self, config: ModelConfig) -> int:
        return min(self.spec(config).max_model_len, self.pooling.max_len or 1 << 62)


@dataclass(frozen=True, slots=True)
class PooledDecoderFamily:
    """Models of the shared decoder that generate nothing. One with a head pools its last token."""

    name: str
    about: str
    spec: Callable[[ModelConfig], DecoderSpec]
    defaults: Mapping[str, object] = field(default_factory=dict)
    make_head: MakeHead | None = None
    pooling: SentencePooling = LAST

    def build(
        self, config: ModelConfig, weights: WeightSource, *, max_model_len: int
    ) -> PooledModel:
        # The head of the language model is not used, and often not there.
        tied = dataclasses.replace(config, tie_word_embeddings=True)
        decoder = Decoder(self.spec(tied), weights, max_model_len=max_model_len)
        return _pooled(decoder, config, weights, make_head=self.make_head, pooling=self.pooling)

    def own_name(self, name: str) -> str | None:
        """Returns the tensor's name in a whole language model. Files of the model without a head
        have no prefix."""
        if name.startswith("lm_head."):
            return None
        return name if name.startswith(("model.", "score.")) else f"model.{name}"

    def context_len(self, config: ModelConfig) -> int:
        return min(config.max_position_embeddings, self.pooling.max_len or 1 << 62)


def _pooled(
    backbone: CausalModel,
    config: ModelConfig,
    weights: WeightSource,
    *,
    make_head: MakeHead | None,
    pooling: SentencePooling,
    is_causal: bool = True,
) -> PooledModel:
    whole_prompts = not is_causal or pooling.mode != "last"
    if make_head is None:
        dense = DenseHead(pooling.dense, config, weights) if pooling.dense else None
        pooler = Pooler(pooling.mode, pooling.has_unit_length, dense)
        return PooledModel(backbone, pooler, task="embed", whole_prompts=whole_prompts)
    head = make_head(config, weights, num_labels(config))
    pooler = Pooler(pooling.mode, has_unit_length=False, head=head)
    return PooledModel(backbone, pooler, task="classify", whole_prompts=whole_prompts)


class DenseHead:
    """The Dense modules of sentence-transformers, `f(W x + b)` each: [rows, hidden] -> [rows, size
    of the last]. Their weights are small, and no part of the checkpoint."""

    __slots__ = ("layers",)

    def __init__(
        self, modules: Sequence[DenseModule], config: ModelConfig, weights: WeightSource
    ) -> None:
        sizes = [config.hidden_size, *(module.out_features for module in modules)]
        for module, size in zip(modules, sizes, strict=False):
            if module.in_features != size:
                raise ConfigError(
                    f"{module.directory}: its in_features are {module.in_features}, but it gets "
                    f"vectors of {size}"
                )
        self.layers = tuple(_read_dense(module, weights) for module in modules)

    def __call__(self, x: Tensor) -> Tensor:
        for weight, bias, activate in self.layers:
            x = activate(functional.linear(x, weight, bias))
        return x


DenseLayer: TypeAlias = tuple[Tensor, Tensor | None, nn.Module]


def _read_dense(module: DenseModule, weights: WeightSource) -> DenseLayer:
    size = module.out_features
    shapes: dict[str, tuple[int, ...]] = {"linear.weight": (size, module.in_features)}
    if module.has_bias:
        shapes["linear.bias"] = (size,)
    with Checkpoint(module.directory) as file:
        found = {name: stored.shape for name, stored in file.tensors.items()}
        if found != shapes:
            raise ConfigError(f"{module.directory}: its tensors are {found}; expected {shapes}")
        read = {
            name: file.read(name).to(weights.device, weights.dtype, copy=True) for name in shapes
        }
    activation: nn.Module = getattr(nn, module.activation)()
    return read["linear.weight"], read.get("linear.bias"), activation


def num_labels(config: ModelConfig) -> int:
    """Returns the number of labels; transformers' default is two."""
    fields = config.fields
    names = fields.section("id2label").names
    return fields.integer("num_labels", default=len(names) or 2)


def score_head(config: ModelConfig, weights: WeightSource, num_labels: int) -> LinearOp:
    """`score(h)`, without a bias."""
    return weights.linear({"score": num_labels}, in_features=config.hidden_size, bias=False)


class RewardHead:
    """`W_2 relu(W_0 h + b_0) + b_2`, one score: Qwen2ForRewardModel, whose code is in the model
    directories of Qwen2.5-Math-RM."""

    __slots__ = ("hidden", "out")

    def __init__(self, config: ModelConfig, weights: WeightSource, num_labels: int) -> None:
        size = config.hidden_size
        self.hidden = weights.linear({"score.0": size}, in_features=size, bias=True)
        self.out = weights.linear({"score.2": 1}, in_features=size, bias=True)

    def __call__(self, x: Tensor) -> Tensor:
        return self.out(self.hidden(x).relu())
