"""A language model that reads pictures: a vision encoder before the shared decoder.

The embeddings of a picture's tokens replace those of its placeholders. Deepstack adds more of the
encoder's features to the residual stream, after the first layers, at the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from aserve.gpu.models.base import Attend, HiddenCapture
from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.models.decoder import Decoder
from aserve.gpu.models.decoder_spec import DecoderSpec
from aserve.gpu.models.vision.encoder import VisionEncoder, VisionSpec, cut_patches
from aserve.gpu.weights.checkpoint import Rename, as_stored
from aserve.gpu.weights.source import WeightSource
from aserve.picture import Picture


@dataclass(frozen=True, slots=True)
class TokenFeatures:
    """Features that the vision encoder computed for some tokens of a forward. Where the tokens of
    a picture see each other, `spans` are its first KV position and the one behind its last."""

    tokens: Tensor  # int64 [n], indices into the forward's tokens
    values: Tensor  # [1 + deep layers, n, hidden]
    spans: Tensor | None = None  # int64 [n, 2]


class VisionLanguageModel:
    """A `CausalModel`, and a `PictureModel` for forwards with pictures."""

    __slots__ = (
        "dtype",
        "has_axes",
        "has_spans",
        "hidden_size",
        "layers",
        "max_model_len",
        "recurrent_layers",
        "text",
        "vision",
        "vocab_size",
    )

    def __init__(self, text: Decoder, vision: VisionEncoder) -> None:
        self.text = text
        self.vision = vision
        self.has_axes = bool(text.spec.rope_axes)  # tokens have rotary positions on several axes
        self.has_spans = vision.spec.sees_itself
        self.layers, self.recurrent_layers = text.layers, text.recurrent_layers
        self.vocab_size = text.vocab_size
        self.hidden_size = text.hidden_size
        self.max_model_len = text.max_model_len
        self.dtype = text.dtype

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        *,
        capture: HiddenCapture | None = None,
    ) -> Tensor:
        return self.text.forward(input_ids, positions, attend, capture=capture)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.text.logits(hidden)

    def encode(self, picture: Picture) -> Tensor:
        """Returns the features of a picture's tokens, [1 + deep layers, tokens, hidden]."""
        spec = self.vision.spec
        side, rows, columns = spec.token_side, picture.rows, picture.columns
        device = self.text.embeddings.device
        raw = torch.frombuffer(bytearray(picture.pixels), dtype=torch.uint8).to(device)
        pixels = scaled(raw.view(rows * side, columns * side, -1), picture)
        patches = cut_patches(pixels, spec, rows=rows, columns=columns)
        return self.vision(patches, rows=rows, columns=columns)

    def forward_with_pictures(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        features: TokenFeatures,
        capture: HiddenCapture | None = None,
    ) -> Tensor:
        """Does what `forward` does, with the features of pictures at their tokens."""
        text, deep = self.text, features.values[1:]
        hidden = text.embed(input_ids).index_copy(0, features.tokens, features.values[0])
        if not len(deep):
            return text.run(hidden, positions, attend, capture)
        assert capture is None, "no drafter reads a model with deepstack"
        cos_sin = [rotary.at(positions) for rotary in text.rotaries]
        normed = text.first_norm(hidden)
        for index, block in enumerate(text.blocks):
            hidden, normed = block.attended(hidden, normed, cos_sin[block.rotary], attend)
            change = block.after_mlp(block.mlp(normed))
            if index < len(deep):
                change = change.index_add(0, features.tokens, deep[index])
            hidden, normed = block.before_next(hidden, change)
        return normed


def scaled(pixels: Tensor, picture: Picture) -> Tensor:
    """pixels uint8 [..., channels] -> float32, `(x * factor - mean) / std`."""
    scale = picture.scale
    mean, std = (pixels.new_tensor(v, dtype=torch.float32) for v in (scale.mean, scale.std))
    return ((pixels.double() * scale.factor).float() - mean) / std


@dataclass(frozen=True, slots=True)
class VisionLanguageFamily:
    """A family of a vision encoder and the shared decoder."""

    name: str
    about: str
    text: Callable[[ModelConfig], DecoderSpec]
    vision: Callable[[ModelConfig], VisionSpec]
    defaults: Mapping[str, object]
    own_name: Rename = as_stored

    def build(
        self, config: ModelConfig, weights: WeightSource, *, max_model_len: int
    ) -> VisionLanguageModel:
        return VisionLanguageModel(
            Decoder(self.text(config), weights, max_model_len=max_model_len),
            VisionEncoder(self.vision(config), weights),
        )
