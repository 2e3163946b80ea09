"""BERT, and RoBERTa and XLM-RoBERTa, whose positions begin behind the id of their padding token.

With a classification head, where c is the hidden state of the first token:

    logits = W_out tanh(W c + b) + b_out

Reference: modeling_bert.py, modeling_roberta.py and modeling_xlm_roberta.py in transformers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aserve.gpu.layers.linear import LinearOp
from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.models.encoder import EncoderSpec
from aserve.gpu.weights.source import WeightSource

DEFAULTS = {
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "type_vocab_size": 2,
    "max_position_embeddings": 512,
}
ROBERTA_DEFAULTS = {**DEFAULTS, "pad_token_id": 1}


def bert(config: ModelConfig) -> EncoderSpec:
    return _spec(config, first_position=0)


def roberta(config: ModelConfig) -> EncoderSpec:
    return _spec(config, first_position=config.fields.integer("pad_token_id", minimum=0) + 1)


def _spec(config: ModelConfig, *, first_position: int) -> EncoderSpec:
    fields = config.fields
    if fields.text("position_embedding_type", default="absolute") != "absolute":
        fields.refuse("position_embedding_type", expected="absolute")
    if fields.flag("is_decoder"):
        fields.refuse("is_decoder", expected="false: every token sees the whole text")
    return EncoderSpec(
        config,
        norm_eps=fields.number("layer_norm_eps"),
        num_positions=fields.integer("max_position_embeddings"),
        first_position=first_position,
        num_segments=fields.integer("type_vocab_size"),
    )


class ClassificationHead:
    __slots__ = ("dense", "out")

    def __init__(self, dense: LinearOp, out: LinearOp) -> None:
        self.dense = dense
        self.out = out

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, hidden] -> [rows, labels]."""
        return self.out(torch.tanh(self.dense(x)))


def bert_head(config: ModelConfig, weights: WeightSource, num_labels: int) -> ClassificationHead:
    return _head(config, weights, ("pooler.dense", "classifier"), num_labels)


def roberta_head(config: ModelConfig, weights: WeightSource, num_labels: int) -> ClassificationHead:
    return _head(config, weights, ("classifier.dense", "classifier.out_proj"), num_labels)


def _head(
    config: ModelConfig, weights: WeightSource, names: tuple[str, str], num_labels: int
) -> ClassificationHead:
    size = config.hidden_size
    dense, out = (
        weights.linear({name: num_rows}, in_features=size, bias=True)
        for name, num_rows in zip(names, (size, num_labels), strict=True)
    )
    return ClassificationHead(dense, out)
