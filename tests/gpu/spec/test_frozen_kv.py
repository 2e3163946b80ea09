"""A drafter with queries only: it reads the target's KV and leaves it as it is."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig

from aserve.errors import ConfigError
from aserve.gpu.build import BuildOptions, build_executor
from aserve.gpu.decode.base import StepRunner
from aserve.gpu.kv.layer_groups import AttentionInputs, LayerSpec
from aserve.gpu.layers.linear import Linear
from aserve.gpu.layers.rope import apply_rope
from aserve.gpu.models.base import Attend, LoadPlan
from aserve.gpu.models.config.fields import Fields
from aserve.gpu.models.decoder import Decoder
from aserve.gpu.models.draft_decoder import DraftDecoder
from aserve.gpu.models.load import make_loader
from aserve.gpu.spec.base import DraftRows, Drafts
from aserve.gpu.spec.checkpoint import read_draft_config
from aserve.gpu.spec.frozen_kv import AssistantModel, ClusteredHead, FrozenKv, layers_of, load
from aserve.gpu.spec.request import DraftRequest, SpecOptions
from aserve.gpu.weights.inventory import Inventory
from aserve.tiny import DRAFTERS_DIR
from tests.fakes.hash_model import HashModel
from tests.gpu.drive import request, serve
from tests.gpu.spec.test_bundled_drafters import PROMPTS, run


def test_drafting_leaves_the_targets_kv_as_it_is_and_stays_at_its_last_position(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draft, forward, num_tokens = FrozenKv.draft, DraftDecoder.forward, []
    seen: list[Tensor] = []

    def noted(
        self: DraftDecoder, ids: Tensor, positions: Tensor, attend: Attend, *, hidden: Tensor
    ) -> Tensor:
        seen.append(positions)
        return forward(self, ids, positions, attend, hidden=hidden)

    def checked(self: FrozenKv, runner: StepRunner, rows: DraftRows) -> Drafts:
        pools = runner.state.pools
        before = [pool.clone() for kv in pools.layers.values() for pool in (kv.keys, kv.values)]
        seen.clear()
        drafts = draft(self, runner, rows)
        assert len(seen) == rows.num_drafts
        assert all(torch.equal(positions, rows.lens - 1) for positions in seen)
        after = [pool for kv in pools.layers.values() for pool in (kv.keys, kv.values)]
        assert all(map(torch.equal, before, after))
        num_tokens.append(drafts.tokens.numel())
        return drafts

    monkeypatch.setattr(FrozenKv, "draft", checked)
    monkeypatch.setattr(DraftDecoder, "forward", noted)
    run([request("r", PROMPTS[0], max_tokens=12)], algorithm="FROZEN_KV_MTP")
    assert sum(num_tokens) >= 4


def test_b24_each_layer_reads_the_targets_last_layer_of_its_kind() -> None:
    config = read_draft_config(DRAFTERS_DIR / "frozen_kv")
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 8}
    config = dataclasses.replace(
        config, head_dim=8, num_heads=4, fields=Fields(kinds, source="config.json")
    )
    target = HashModel(window=6)
    assert [(layer.kv_layer, layer.window) for layer in layers_of(config, target)] == [
        (1, 6),
        (0, None),
    ]
    with pytest.raises(ConfigError, match="layer 0 has sliding_attention"):
        layers_of(config, HashModel())
    with pytest.raises(ConfigError, match="4 heads of 16 elements, but reads 1 KV heads of 8"):
        layers_of(dataclasses.replace(config, head_dim=16), target)


def test_a_clustered_head_admits_the_tokens_of_the_best_clusters() -> None:
    fields = Fields({"num_centroids": 3, "centroid_intermediate_top_k": 1}, source="c")
    ordering = torch.tensor([4, 1, 0, 5, 2, 3])  # three clusters of two tokens
    head = ClusteredHead(fields, ordering, Inventory(torch.float32), hidden_size=3)
    head._centroids = Linear(torch.eye(3))
    hidden = torch.tensor([[0.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    masked = head.masked(torch.arange(12.0).view(2, 6), hidden)
    infinite = -torch.inf
    assert masked.tolist() == [
        [0.0, infinite, infinite, infinite, infinite, 5.0],
        [infinite, 7.0, infinite, infinite, 10.0, infinite],
    ]
    with pytest.raises(ConfigError, match="a divisor of 5 tokens"):
        ClusteredHead(fields, ordering[:5], Inventory(torch.float32), hidden_size=3)


# Published fields, small: one layer of each kind, and a head of four clusters.
ASSISTANT: dict[str, Any] = {
    "architectures": ["Gemma4AssistantForCausalLM"],
    "model_type": "gemma4_assistant",
    "backbone_hidden_size": 32,
    "use_ordered_embeddings": True,
    "num_centroids": 4,
    "centroid_intermediate_top_k": 2,
    "tie_word_embeddings": True,
    "text_config": {
        "model_type": "gemma4_text",
        "vocab_size": 36,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_kv_shared_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "global_head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 6,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "max_position_embeddings": 64,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
}
TARGET: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 36,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "use_sliding_window": True,
    "sliding_window": 6,
    "max_window_layers": 2,
}


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> Gemma4AssistantForCausalLM:
    # This property raises an error if all layers read the KV of another model.
    modes = property(lambda self: ["reuse"] * self.num_hidden_layers)
    monkeypatch.setattr(Gemma4TextConfig, "kv_sharing_modes", modes)
    torch.manual_seed(5)
    fields = {name: value for name, value in ASSISTANT.items() if name != "architectures"}
    made = Gemma4AssistantForCausalLM(Gemma4AssistantConfig(**copy.deepcopy(fields))).eval()
    for parameter in made.requires_grad_(False).parameters():
        parameter.normal_(std=0.3)
    made.masked_embedding.token_ordering.copy_(torch.randperm(36))
    return made


def write_models(directory: Path, reference: Gemma4AssistantForCausalLM) -> None:
    """The config of a target, and the reference's config and weights."""
    for name, config in (("draft", ASSISTANT), ("target", TARGET)):
        (directory / name).mkdir()
        (directory / name / "config.json").write_text(json.dumps(config))
    stored = {n: t.clone() for n, t in reference.state_dict().items() if n != "lm_head.weight"}
    save_file(stored, directory / "draft" / "model.safetensors")


def test_b24_windows_of_the_target_are_read_past_their_wrap(
    tmp_path: Path, reference: Gemma4AssistantForCausalLM
) -> None:
    """Weights are random, so this is about pages: those behind the window have new owners."""
    write_models(tmp_path, reference)
    asked = [request(str(n), [n, 5, 7], max_tokens=40, seed=n, temperature=0.8) for n in range(3)]
    outputs = []
    for spec in (None, SpecOptions("FROZEN_KV_MTP", draft_model_dir=tmp_path / "draft")):
        options: dict[str, Any] = {"page_size": 2, "num_pages": 60, "debug_checks": True}
        build = BuildOptions(
            tmp_path / "target", "dummy", dtype="float64", speculative=spec, **options
        )
        outputs.append(serve(build_executor(build), asked).outputs)
    assert outputs[0] == outputs[1]


@torch.inference_mode()
def test_the_assistant_computes_what_transformers_does(
    tmp_path: Path, reference: Gemma4AssistantForCausalLM
) -> None:
    write_models(tmp_path, reference)
    target = make_loader(tmp_path / "target")[0].load(LoadPlan(torch.float32, is_dummy=True))
    options = SpecOptions("FROZEN_KV_MTP", draft_model_dir=tmp_path / "draft")
    model = load(DraftRequest(options, target, LoadPlan(torch.float32))).model
    assert isinstance(model, AssistantModel)
    assert isinstance(target, Decoder)

    length = 9  # more than the window
    kv = {layer.index: torch.randn(2, length, 8) for layer in model.layers}

    def attend(layer: LayerSpec, inputs: AttentionInputs) -> Tensor:
        assert inputs.rope is not None
        (query,) = apply_rope(inputs.heads, inputs.rope)
        keys, values = kv[layer.index][:, -(layer.window or length) :]
        return ((query @ keys.T).softmax(1) @ values)[None]

    token, hidden = torch.tensor([7]), torch.randn(1, 32)
    normed = model.forward(token, torch.tensor([length - 1]), attend, hidden=hidden)
    embedded = target.embeddings[token] * 32**0.5
    expected = reference(
        inputs_embeds=torch.cat((embedded, hidden), dim=1)[None],
        shared_kv_states={
            "sliding_attention": tuple(kv[0][:, None, None, -6:]),  # what a sliding cache keeps
            "full_attention": tuple(kv[1][:, None, None]),
        },
        position_ids=torch.tensor([[length - 1]]),
    )
    torch.testing.assert_close(model.next_hidden(normed), expected.last_hidden_state[0])
    logits, is_real = model.logits(normed)[0], expected.logits[0, 0] > expected.logits.min()
    assert torch.equal(logits.isfinite(), is_real)
    assert is_real.sum() == 18  # two of four clusters
    torch.testing.assert_close(logits[is_real], expected.logits[0, 0][is_real])
