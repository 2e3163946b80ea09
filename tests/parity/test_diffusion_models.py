"""Models that fill blocks: LLaDA2 against plain torch, and SDAR against transformers' Qwen3 with a
block-causal mask.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from aserve.errors import ConfigError
from aserve.gpu.models.config.fields import Fields
from aserve.gpu.models.config.model import parse_config
from aserve.gpu.models.families.llada2 import own_name
from aserve.gpu.models.registry import FAMILIES
from aserve.gpu.weights.inventory import Inventory
from tests.load_model import load_model
from tests.parity.conftest import ReferenceOf
from tests.parity.dense_attend import logits_of
from tests.parity.references import MAX_MODEL_LEN
from tools.train_models.dllm import Dllm
from tools.train_models.llada import BLOCK_SIZE, Llada, block_causal
from tools.train_tiny.network import FeedForward, Shape

NUM_TOKENS = 5 * BLOCK_SIZE + 3
CHUNKS = [BLOCK_SIZE, 3 * BLOCK_SIZE, BLOCK_SIZE + 3]
EXPERTS: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_shared_experts": 2,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
DENSE: dict[str, Any] = {
    **Dllm().config(),
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "head_dim": 16,
}
SHAPE = Shape(
    vocab_size=96,
    hidden_size=32,
    num_hidden_layers=2,
    head_dim=16,
    intermediate_size=40,
    rope_theta=100.0,
)


class NaiveExperts(nn.Module):
    """Experts of the best groups, chosen by corrected sigmoid scores, token by token."""

    def __init__(self) -> None:
        super().__init__()
        size = EXPERTS["moe_intermediate_size"]
        count, width = EXPERTS["num_experts"], SHAPE.hidden_size
        self.gate = nn.Linear(width, count, bias=False)
        self.gate.register_buffer("expert_bias", torch.randn(count) * 0.3)
        self.experts = nn.ModuleList(_mlp(size) for _ in range(count))
        self.shared_experts = _mlp(size * EXPERTS["num_shared_experts"])

    def forward(self, hidden: Tensor) -> Tensor:
        rows = [self._token(token) for token in hidden.flatten(0, -2)]
        return torch.stack(rows).view(hidden.shape)

    def _token(self, token: Tensor) -> Tensor:
        scores = self.gate(token).sigmoid()
        choice = scores + self.gate.expert_bias
        groups = choice.view(EXPERTS["n_group"], -1).topk(2).values.sum(1)
        kept = groups.topk(EXPERTS["topk_group"]).indices
        by_group = torch.full_like(choice, -torch.inf).view(EXPERTS["n_group"], -1)
        by_group[kept] = choice.view(EXPERTS["n_group"], -1)[kept]
        best = by_group.flatten().topk(EXPERTS["num_experts_per_tok"]).indices
        weights = scores[best] / scores[best].sum() * EXPERTS["routed_scaling_factor"]
        parts = [weights[n] * self.experts[expert](token) for n, expert in enumerate(best.tolist())]
        return self.shared_experts(token) + sum(parts)


def _mlp(size: int) -> FeedForward:
    return FeedForward(dataclasses.replace(SHAPE, intermediate_size=size))


def save_llada(folder: Path, *, has_experts: bool) -> Llada:
    torch.manual_seed(3)
    network = Llada(SHAPE, partial_rotary_factor=0.5)
    if has_experts:
        network.model.layers[1].mlp = NaiveExperts()
    with torch.no_grad():
        for weight in network.parameters():
            weight.normal_(mean=float(weight.ndim == 1), std=0.3)
    config = {**DENSE, **EXPERTS} if has_experts else {**DENSE, "first_k_dense_replace": 2}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: value.contiguous() for name, value in network.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    return network.eval()


@pytest.mark.parametrize("has_experts", [False, True])
def test_llada2_equals_plain_torch(tmp_path: Path, *, has_experts: bool) -> None:
    """Prompts come whole, or in chunks of whole blocks."""
    network = save_llada(tmp_path, has_experts=has_experts)
    ids = torch.randint(SHAPE.vocab_size, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = network(ids[None])[0][0]
    model = load_model(tmp_path, max_model_len=64)
    for chunks in (None, CHUNKS):
        got = logits_of(model, ids, chunks=chunks)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0.0)
    assert len(set(expected.argmax(-1).tolist())) > 10


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [("qwen3", "SDARForCausalLM"), ("qwen3-moe", "SDARMoeForCausalLM")],
)
def test_sdar_equals_qwen3_with_a_mask_of_blocks(
    kind: str, architecture: str, reference_of: ReferenceOf, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    reference = reference_of(kind)
    ids = reference.tokens[:NUM_TOKENS]
    model = AutoModelForCausalLM.from_pretrained(reference.directory, attn_implementation="eager")
    hidden = torch.zeros(1, 1, NUM_TOKENS, NUM_TOKENS)
    hidden.masked_fill_(~block_causal(NUM_TOKENS), -torch.inf)
    with torch.inference_mode():
        expected = model(ids[None], attention_mask=hidden).logits[0]
    config = json.loads((reference.directory / "config.json").read_text())
    changed = {"architectures": [architecture], "model_type": "sdar", "block_size": BLOCK_SIZE}
    (tmp_path / "config.json").write_text(json.dumps({**config, **changed}))
    (tmp_path / "model.safetensors").symlink_to(reference.directory / "model.safetensors")
    ours = load_model(tmp_path, max_model_len=MAX_MODEL_LEN)
    got = logits_of(ours, ids, chunks=CHUNKS)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0.0)
    assert not torch.allclose(got, reference.logits[:NUM_TOKENS], atol=0.1)


MINI: dict[str, Any] = {
    "architectures": ["LLaDA2MoeModelLM"],
    "vocab_size": 157184,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 32768,
    "rope_theta": 600000,
    "tie_word_embeddings": False,
    "use_bias": False,
    "use_qkv_bias": False,
    "rope_scaling": None,
}


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    family = FAMILIES[config["architectures"][0]]
    parsed = parse_config(Fields(config, source="config.json"), defaults=family.defaults)
    inventory = Inventory(torch.float32)
    family.build(parsed, inventory, max_model_len=1)
    return inventory.shapes


def test_the_tensors_of_llada2_mini_are_those_that_are_published() -> None:
    """Of the names and shapes of inclusionAI/LLaDA2.0-mini, with fewer layers."""
    shapes = shapes_of(MINI)
    for stored, shape in {
        "model.word_embeddings.weight": (157184, 2048),
        "model.layers.0.attention.query_key_value.weight": (24 * 128, 2048),
        "model.layers.0.attention.dense.weight": (2048, 2048),
        "model.layers.1.attention.query_layernorm.weight": (128,),
        "model.layers.0.mlp.gate_proj.weight": (5120, 2048),
        "model.layers.1.mlp.gate.weight": (256, 2048),
        "model.layers.1.mlp.gate.expert_bias": (256,),
        "model.layers.1.mlp.experts.255.down_proj.weight": (2048, 512),
        "model.layers.1.mlp.shared_experts.up_proj.weight": (512, 2048),
        "lm_head.weight": (157184, 2048),
    }.items():
        assert shapes[own_name(stored)] == shape
    assert len(shapes) == 3 + 2 * 6 + 3 + 2 + 3 * 257


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_head": True}, "norm_head is True; expected false"),
        ({"score_function": "softmax"}, "score_function is 'softmax'; expected sigmoid"),
        ({"block_size": 1}, "block_size is 1; expected an integer of at least 2"),
        ({"sliding_window": 64}, "sliding_window"),
    ],
)
def test_a_config_that_is_not_understood_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shapes_of({**MINI, **changes})
