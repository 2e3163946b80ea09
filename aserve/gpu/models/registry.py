"""The model families by architecture. A new family is a file in families/ and a line here.

An architecture without a line runs in transformers' code, if it can.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from aserve.errors import ConfigError
from aserve.gpu.models.base import CausalModel
from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.models.decoder import Decoder
from aserve.gpu.models.decoder_spec import DecoderSpec
from aserve.gpu.models.families import (
    gemma2,
    gemma3,
    granite,
    llama,
    mistral,
    olmo2,
    phi3,
    qwen2,
    qwen3,
)
from aserve.gpu.weights.source import WeightSource


class Family(Protocol):
    """The models of one architecture."""

    @property
    def defaults(self) -> Mapping[str, object]:
        """The values of the reference code for fields that config.json leaves out. A field that is
        null has no default."""

    def build(
        self, config: ModelConfig, weights: WeightSource, *, max_model_len: int
    ) -> CausalModel: ...


@dataclass(frozen=True, slots=True)
class DecoderFamily:
    """A family of the shared decoder, which differs from the others by its `DecoderSpec` alone."""

    spec: Callable[[ModelConfig], DecoderSpec]
    defaults: Mapping[str, object] = field(default_factory=dict)

    def build(self, config: ModelConfig, weights: WeightSource, *, max_model_len: int) -> Decoder:
        return Decoder(self.spec(config), weights, max_model_len=max_model_len)


FAMILIES: Mapping[str, Family] = {
    "Gemma2ForCausalLM": DecoderFamily(gemma2.gemma2, gemma2.DEFAULTS),
    "Gemma3ForCausalLM": DecoderFamily(gemma3.gemma3, gemma3.DEFAULTS),
    "GraniteForCausalLM": DecoderFamily(granite.granite),
    "LlamaForCausalLM": DecoderFamily(llama.llama),
    "MiMoForCausalLM": DecoderFamily(qwen2.qwen2, qwen2.DEFAULTS),
    "MistralForCausalLM": DecoderFamily(mistral.mistral, mistral.DEFAULTS),
    "Olmo2ForCausalLM": DecoderFamily(olmo2.olmo2, olmo2.DEFAULTS),
    "Phi3ForCausalLM": DecoderFamily(phi3.phi3, phi3.DEFAULTS),
    "Qwen2ForCausalLM": DecoderFamily(qwen2.qwen2, qwen2.DEFAULTS),
    "Qwen3ForCausalLM": DecoderFamily(qwen3.qwen3, qwen3.DEFAULTS),
}


class Code(NamedTuple):
    """The code that runs a model, and the reason for the choice."""

    name: Literal["native", "transformers"]
    why: str


def choose_code(architecture: str, asked: str) -> Code:
    is_native = architecture in FAMILIES
    match asked:
        case "auto" if is_native:
            return Code("native", "auto")
        case "auto":
            return Code("transformers", f"auto: no native code for {architecture}")
        case "transformers":
            return Code("transformers", "as asked")
        case "native" if is_native:
            return Code("native", "as asked")
        case "native":
            supported = ", ".join(sorted(FAMILIES))
            raise ConfigError(
                f"there is no native code for {architecture}; there is for {supported}; "
                "the model implementation auto or transformers may run it"
            )
        case _:
            raise ConfigError(f"model_impl is {asked!r}; expected auto, native or transformers")
