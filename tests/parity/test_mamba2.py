"""Models with Mamba-2 layers: bounds of steps, older configurations, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from aserve.errors import ConfigError
from tests.load_model import load_model
from tests.parity.conftest import ReferenceOf
from tests.parity.dense_attend import logits_of
from tests.parity.references import PROMPT_LEN, VOCAB_SIZE, new_model

pytestmark = pytest.mark.slow

# Fields of newer configurations, and what older ones have in their place.
OLDER: dict[str, dict[str, Any]] = {
    "granite-hybrid": {
        "layer_types": ["mamba", "attention", "mamba"],
        "mamba_d_head": "auto",
        "position_embedding_type": "nope",
        "time_step_limit": [0.0, float("inf")],
    },
    "nemotron-h": {
        "layers_block_type": None,
        "hybrid_override_pattern": "M-*EMM*-E",
        "num_hidden_layers": 9,
        "time_step_limit": [0.0, float("inf")],
    },
    "falcon-h1": {"mamba_d_head": "auto", "time_step_limit": None},
}


def rewrite(directory: Path, fields: dict[str, Any]) -> None:
    path = directory / "config.json"
    values = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({name: v for name, v in values.items() if v is not None}))


def copied(directory: Path, target: Path) -> Path:
    for file in directory.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


@torch.inference_mode()
def test_bounds_of_steps_are_those_of_transformers_for_prompts(tmp_path: Path) -> None:
    """Decodes of transformers do not know them, so that the prompt is one forward."""
    model = new_model("granite-hybrid-rope", time_step_limit=(0.6, 0.9))
    model.save_pretrained(tmp_path)
    ids = torch.randint(VOCAB_SIZE, (PROMPT_LEN,), generator=torch.Generator().manual_seed(3))
    logits = logits_of(load_model(tmp_path), ids)
    torch.testing.assert_close(logits, model(ids[None]).logits[0], atol=1e-4, rtol=0.0)
    rewrite(tmp_path, {"time_step_limit": None})
    unbounded = logits_of(load_model(tmp_path), ids)
    assert not torch.allclose(logits, unbounded, atol=1e-2)


@pytest.mark.parametrize("kind", OLDER)
def test_older_configurations_describe_the_same_model(
    kind: str, reference_of: ReferenceOf, tmp_path: Path
) -> None:
    reference = reference_of(kind)
    older = copied(reference.directory, tmp_path)
    rewrite(older, OLDER[kind])
    expected = logits_of(load_model(reference.directory), reference.prompt)
    assert torch.equal(logits_of(load_model(older), reference.prompt), expected)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("granite-hybrid", {"layer_types": ["mamba"] * 3}, "layer_types.*at least one layer"),
        ("granite-hybrid", {"layer_types": ["rwkv"] * 3}, "layer_types.*mamba or attention"),
        ("granite-hybrid", {"mamba_n_heads": 5}, "mamba_n_heads is 5.*96 elements together"),
        ("granite-hybrid", {"mamba_n_groups": 4}, "mamba_n_groups is 4.*divisor"),
        ("granite-hybrid", {"time_step_limit": [0.5]}, "time_step_limit.*two numbers"),
        ("granite-hybrid", {"time_step_limit": [0.5, 0.1]}, "time_step_limit.*ascending"),
        ("bamba", {"attn_layer_indices": [3]}, "attn_layer_indices.*below 3"),
        ("nemotron-h", {"layers_block_type": ["moe"] * 9}, r"layers_block_type.*at least one \*"),
        ("nemotron-h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act.*relu2"),
        ("nemotron-h", {"moe_latent_size": 24}, "moe_latent_size is 24.*null"),
        ("nemotron-h", {"mlp_bias": True}, "mlp_bias.*false beside experts"),
        ("nemotron-h", {"n_groups": 4}, "n_groups is 4.*divisor"),
    ],
)
def test_what_the_layers_cannot_be_is_refused(
    kind: str, fields: dict[str, Any], message: str, reference_of: ReferenceOf, tmp_path: Path
) -> None:
    directory = copied(reference_of(kind).directory, tmp_path)
    rewrite(directory, fields)
    with pytest.raises(ConfigError, match=message):
        load_model(directory)
