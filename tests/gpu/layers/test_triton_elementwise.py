"""Decoders with Triton layers, in the interpreter, against the same decoders in torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from aserve.gpu.device.cuda.ops import triton_elementwise, triton_store
from aserve.gpu.kv.store import RopeAndStoreKv, rope_then_store_kv
from aserve.gpu.layers.ops import PLAIN, Elementwise
from aserve.gpu.weights.source import Target
from tests.load_model import load_model
from tests.parity.dense_attend import DenseAttend

SIZES = {
    "vocab_size": 50,
    "hidden_size": 40,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "initializer_range": 0.5,
}
# Norms before; of heads; around, with gelu; after, and of all heads together; a scaled residual.
FAMILIES: dict[str, dict[str, object]] = {
    "Llama": {},
    "Qwen3": {},
    "Gemma2": {"query_pre_attn_scalar": 24, "sliding_window": 24},
    "Olmo2": {},
    "Granite": {"residual_multiplier": 0.3},
}


@torch.inference_mode()
def logits_of(directory: Path, elementwise: Elementwise, store: RopeAndStoreKv) -> Tensor:
    target = Target(elementwise=elementwise)
    model = load_model(directory, load_format="dummy", target=target)
    tokens = torch.arange(7) * 5
    return model.logits(model.forward(tokens, torch.arange(7), DenseAttend(store)))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_the_logits_of_torch(family: str, tmp_path: Path) -> None:
    config = {**SIZES, **FAMILIES[family], "architectures": [f"{family}ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = logits_of(tmp_path, PLAIN, rope_then_store_kv)
    assert expected.std() > 0.01
    got = logits_of(tmp_path, triton_elementwise(torch.float32), triton_store(torch.float32))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_float64_stays_in_torch() -> None:
    assert triton_elementwise(torch.float64) is PLAIN
