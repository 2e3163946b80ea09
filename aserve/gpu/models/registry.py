"""Which file builds which architecture. A new family is one line here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from aserve.errors import ConfigError
from aserve.gpu.models.causal_model import CausalModel
from aserve.gpu.models.config import ModelConfig
from aserve.gpu.models.llama import build_llama
from aserve.gpu.models.qwen3 import build_qwen3
from aserve.gpu.weights.source import WeightSource


class Family(Protocol):
    def __call__(
        self, config: ModelConfig, weights: WeightSource, *, max_model_len: int
    ) -> CausalModel: ...


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": build_llama,
    "Qwen3ForCausalLM": build_qwen3,
}


def find_family(architecture: str) -> Family:
    family = FAMILIES.get(architecture)
    if family is None:
        supported = ", ".join(sorted(FAMILIES))
        raise ConfigError(f"architecture {architecture} is not supported; supported: {supported}")
    return family
