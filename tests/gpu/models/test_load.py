"""The rules of the loader, each with one thing spoiled, and random weights."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aserve.errors import ConfigError
from aserve.gpu.layers.linear import Linear, LinearOp, prepare
from aserve.gpu.models.base import CausalModel
from aserve.gpu.models.load import make_loader
from aserve.gpu.models.registry import FAMILIES
from aserve.gpu.weights.checkpoint import Checkpoint
from aserve.gpu.weights.dummy import STD, DummyWeights
from aserve.gpu.weights.inventory import Inventory
from aserve.gpu.weights.reader import WeightReader
from aserve.gpu.weights.source import HOST, LoadProgress, Target
from tests.gpu.weights.checkpoints import (
    llama_weights,
    write_checkpoint,
    write_config,
    write_sharded,
)
from tests.load_model import load_model
from tests.parity.dense_attend import DenseAttend, given_ids

CPU = torch.device("cpu")
IDS = torch.tensor([3, 1, 20, 7])
MODELS = Path(__file__).parents[2] / "models"
MEMBERS = ("moe", "mla", "dsa", "ngram_emb", "vl", "dllm")


def logits_of(model: CausalModel) -> Tensor:
    ids = given_ids(model, IDS)
    return model.logits(model.forward(ids, torch.arange(len(IDS)), DenseAttend()))


def refusal_of(directory: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_model(directory)
    return str(caught.value)


def test_shards_nested_configs_and_stored_rotary_tables_give_the_same_model(tmp_path: Path) -> None:
    weights = llama_weights()
    names = sorted(weights)
    shards = {
        f"model-0000{part}-of-00003.safetensors": {name: weights[name] for name in names[part::3]}
        for part in range(3)
    }
    sizes = {"hidden_size": 8, "num_hidden_layers": 2}
    outer = {"hidden_size": 640, "num_hidden_layers": 99}
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.full((2,), 99.0)}
    expected = logits_of(load_model(write_checkpoint(tmp_path / "plain", weights)))
    for directory in (
        write_sharded(tmp_path / "sharded", shards),
        write_checkpoint(tmp_path / "nested", weights, **outer, text_config=sizes),
        write_checkpoint(tmp_path / "old", {**weights, **table}),
    ):
        assert torch.equal(logits_of(load_model(directory)), expected)


MISFITS: dict[str, tuple[dict[str, Tensor | None], str]] = {
    "a layer's weight": (
        {"model.layers.1.self_attn.k_proj.weight": None},
        "missing: model.layers.1.self_attn.k_proj.weight",
    ),
    "the head of an untied model": ({"lm_head.weight": None}, "missing: lm_head.weight"),
    "more than the model has": (
        {"model.layers.0.self_attn.q_proj.bias": torch.zeros(8)},
        "unexpected: model.layers.0.self_attn.q_proj.bias",
    ),
    "more layers": (
        {f"model.layers.2.{number}": torch.zeros(1) for number in range(9)},
        "model.layers.2.4 and 4 more",
    ),
    "another shape": (
        {"model.layers.0.mlp.down_proj.weight": torch.zeros(12, 8)},
        "model.layers.0.mlp.down_proj.weight is 12x8 instead of 8x12",
    ),
    "quantized": ({"lm_head.weight": torch.zeros(24, 8).to(torch.int8)}, "lm_head.weight is I8"),
    "a name for another": (
        {"model.norm.weight": None, "stranger": torch.zeros(8)},
        "missing: model.norm.weight; unexpected: stranger",
    ),
}


@pytest.mark.parametrize(("changes", "complaint"), MISFITS.values(), ids=MISFITS)
def test_weights_that_do_not_fit_are_named_in_one_error(
    changes: dict[str, Tensor | None], complaint: str, tmp_path: Path
) -> None:
    weights = {**llama_weights(), **changes}
    kept = {name: weight for name, weight in weights.items() if weight is not None}
    assert complaint in refusal_of(write_checkpoint(tmp_path, kept))


def test_scales_of_kv_are_read_where_a_checkpoint_has_them(tmp_path: Path) -> None:
    scales = {
        "model.layers.0.self_attn.k_scale": torch.tensor(0.5),
        "model.layers.0.self_attn.v_scale": torch.tensor([0.25]),
        "model.layers.1.self_attn.attn.v_scale": torch.tensor(2.0),
    }
    model = load_model(write_checkpoint(tmp_path, {**llama_weights(), **scales}))
    assert [layer.kv_scales for layer in model.layers] == [(0.5, 0.25), (1.0, 2.0)]


def noting(seen: list[Tensor]) -> Target:
    """Keeps the weights of all linear layers in `seen`."""

    def noted(linear: Linear, device: torch.device, /, *, dtype: torch.dtype) -> LinearOp:
        seen.append(linear.weight)
        return prepare(linear, device, dtype=dtype)

    return Target(prepare=noted)


def test_a_tied_head_is_the_embeddings_and_costs_nothing(tmp_path: Path) -> None:
    weights = llama_weights()
    del weights["lm_head.weight"]
    seen: list[Tensor] = []
    directory = write_checkpoint(tmp_path, weights, tie_word_embeddings=True)
    model = load_model(directory, target=noting(seen))
    assert torch.equal(seen[-1], weights["model.embed_tokens.weight"])
    untied = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    twin = load_model(write_checkpoint(tmp_path / "untied", untied))
    assert torch.equal(logits_of(model), logits_of(twin))
    bytes_of = _total_bytes(directory), _total_bytes(tmp_path / "untied")
    assert bytes_of[1] - bytes_of[0] == 24 * 8 * 4


def test_a_copy_of_tied_embeddings_is_accepted(tmp_path: Path) -> None:
    weights = llama_weights()
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    model = load_model(write_checkpoint(tmp_path, weights, tie_word_embeddings=True))
    assert torch.isfinite(logits_of(model)).all()


def test_a_head_that_differs_from_the_embeddings_it_is_tied_to_is_refused(tmp_path: Path) -> None:
    message = refusal_of(write_checkpoint(tmp_path, llama_weights(), tie_word_embeddings=True))
    assert "lm_head.weight differs" in message


def test_the_model_does_not_depend_on_its_files_after_the_load(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, llama_weights())
    model = load_model(directory)
    before = logits_of(model)
    file = directory / "model.safetensors"
    file.write_bytes(bytes(file.stat().st_size))
    assert torch.equal(logits_of(model), before)


def test_joined_rows_keep_the_order_of_their_parts(tmp_path: Path) -> None:
    weights = llama_weights()
    seen: list[Tensor] = []
    load_model(write_checkpoint(tmp_path, weights), target=noting(seen))
    parts = [weights[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(seen[0], torch.cat(parts))
    assert len(seen) == 2 * 4 + 1, "qkv, o, gate-up and down of each layer, and the head"


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_progress_only_grows_and_ends_at_the_total(load_format: str, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, llama_weights(dtype=torch.bfloat16))
    calls: list[tuple[int, int]] = []
    load_model(directory, load_format=load_format, on_progress=lambda *call: calls.append(call))
    done = [call[0] for call in calls]
    assert len({total for _, total in calls}) == 1
    assert done == sorted(set(done))
    assert done[-1] == calls[-1][1] == sum(w.numel() * 4 for w in llama_weights().values())


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_model_larger_than_memory_is_refused_before_a_value_is_made(
    load_format: str, tmp_path: Path
) -> None:
    directory = write_checkpoint(tmp_path, llama_weights())
    needed = _total_bytes(directory)
    load = partial(load_model, directory, load_format=load_format)
    rope_table = 16 * 4 * 4
    load(target=Target(memory_bytes=needed + rope_table))
    calls: list[int] = []
    target = Target(memory_bytes=needed - 1)
    with pytest.raises(ConfigError, match=r"weights need 0\.000 GiB as float32, but only 0\.000"):
        load(target=target, on_progress=lambda done, _: calls.append(done))
    assert calls == []


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_rope_table_larger_than_memory_is_refused_before_a_value_is_made(
    load_format: str, tmp_path: Path
) -> None:
    directory = write_checkpoint(tmp_path, llama_weights(), max_position_embeddings=2**31 - 1)
    load = partial(load_model, directory, load_format=load_format)
    calls: list[int] = []
    target = Target(memory_bytes=1 << 30)
    with pytest.raises(ConfigError) as caught:
        load(target=target, on_progress=lambda done, _: calls.append(done))
    assert str(caught.value) == (
        "max_model_len is 2147483647, but the rope table of as many positions needs 32.000 GiB, "
        "and 1.000 GiB are available beside the weights; choose a smaller --max-model-len"
    )
    assert calls == []
    assert load(target=target, max_model_len=64).max_model_len == 64


def test_more_experts_than_any_model_has_are_refused_before_their_tensors_are_listed(
    tmp_path: Path,
) -> None:
    own = {"architectures": ["MixtralForCausalLM"], "num_experts_per_tok": 2}
    directory = write_config(tmp_path, **own, num_local_experts=1 << 17)
    with pytest.raises(ConfigError, match="has 131072 experts; at most 16384 are supported"):
        load_model(directory, load_format="dummy")


def test_heads_that_do_not_fit_the_weights_are_refused_before_their_frequencies_are_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_checkpoint(tmp_path, llama_weights(), head_dim=64)
    monkeypatch.delattr("aserve.gpu.layers.rope.inverse_frequencies")
    assert "q_proj.weight is 8x8 instead of 128x8" in refusal_of(directory)


def test_what_a_norm_adds_to_its_weight_is_not_rounded_away(tmp_path: Path) -> None:
    """Gemma's norms store the distance from one, mostly far less than bfloat16 can add to it."""
    weights = {"norm.weight": torch.full((8,), 0.001, dtype=torch.bfloat16)}
    with Checkpoint(write_checkpoint(tmp_path, weights)) as checkpoint:
        progress = LoadProgress(0, dtype=torch.bfloat16)
        reader = WeightReader(checkpoint, HOST, dtype=torch.bfloat16, progress=progress)
        weight = reader.tensor("norm.weight", (8,), offset=1.0)
    assert torch.equal(weight, 1.0 + weights["norm.weight"].float())


@pytest.mark.slow
def test_an_architecture_that_nobody_knows_is_one_clear_error(tmp_path: Path) -> None:
    """Slow: transformers is asked."""
    message = refusal_of(write_config(tmp_path, architectures=["FooForCausalLM"]))
    assert "transformers cannot read" in message
    assert "config.json: Unrecognized model" in message


def test_code_that_is_asked_for_and_not_there_is_refused(tmp_path: Path) -> None:
    directory = write_config(tmp_path, architectures=["FooForCausalLM"])
    with pytest.raises(ConfigError, match=r"no native code for FooForCausalLM; there is for Bamba"):
        load_model(directory, model_impl="native")


def _total_bytes(directory: Path) -> int:
    totals: set[int] = set()
    load_model(directory, on_progress=lambda _, total: totals.add(total))
    (total,) = totals
    return total


@pytest.mark.slow
def test_loading_imports_nothing_that_takes_seconds(tmp_path: Path) -> None:
    """Not transformers, not the hub's client, not torch's compiler (any arithmetic on meta tensors
    imports that one)."""
    folders = [write_checkpoint(tmp_path, llama_weights()), *(MODELS / name for name in MEMBERS)]
    program = (
        "import pathlib, sys\n"
        "from tests.load_model import load_model\n"
        f"for folder in {[str(folder) for folder in folders]}:\n"
        "    load_model(pathlib.Path(folder))\n"
        "heavy = {'transformers', 'huggingface_hub', 'torch._dynamo', 'torch._inductor'}\n"
        "sys.exit(', '.join(sorted(heavy & sys.modules.keys())) or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GPTNeoXForCausalLM"])
def test_more_layers_than_memory_can_hold_are_refused_before_one_is_built(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*_: object, **__: object) -> None:
        raise AssertionError("a layer was built")

    monkeypatch.setattr(Inventory, "linear", build)
    monkeypatch.setattr(torch.nn.Linear, "__init__", build)
    write_config(tmp_path, architectures=[architecture], num_hidden_layers=10**7)
    with pytest.raises(ConfigError) as caught:
        make_loader(tmp_path, free_bytes=1 << 30)
    assert str(caught.value) == (
        f"{tmp_path}/config.json: num_hidden_layers is 10000000; expected a number of layers that "
        "fits into memory: these take at least 38.7 GiB, and 1.0 GiB are available"
    )


def source(dtype: torch.dtype = torch.float32) -> DummyWeights:
    return DummyWeights(HOST, dtype=dtype, progress=LoadProgress(0, dtype=dtype))


PICTURES: dict[str, Any] = {
    "head_dim": 8,
    "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
    "vision_config": {
        "embed_dim": 8,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_heads": 2,
        "depth": 2,
        "deepstack_visual_indexes": [1],
    },
}

NGRAMS: dict[str, Any] = {
    "emb_neighbor_num": 3,
    "emb_split_num": 2,
    "ngram_vocab_size_ratio": 2,
    "eos_token_id": 2,
}


HEADS: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_ssm": None}
MAMBAS: dict[str, dict[str, Any]] = {
    "BambaForCausalLM": {**HEADS, "attn_layer_indices": [0], "head_dim": 8},
    "FalconH1ForCausalLM": HEADS,
    "GraniteMoeHybridForCausalLM": {**HEADS, "layer_types": ["mamba", "attention"]},
    "NemotronHForCausalLM": {"hybrid_override_pattern": "M*", "mamba_num_heads": 8},
}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_configuration_alone_makes_the_same_model_each_time(
    architecture: str, tmp_path: Path
) -> None:
    fields = PICTURES if architecture.endswith("ForConditionalGeneration") else NGRAMS
    if architecture.startswith("Qwen3_5"):
        fields = {**fields, "head_dim": 32}  # of which rope rotates a quarter
    fields = {**fields, **MAMBAS.get(architecture, {})}
    directory = write_config(
        tmp_path, architectures=[architecture], num_experts_per_tok=2, **fields
    )
    first, again = (logits_of(load_model(directory, load_format="dummy")) for _ in range(2))
    assert first.isfinite().all()
    assert torch.equal(first, again)


def test_a_weight_depends_on_its_name_and_not_on_what_came_before() -> None:
    late = source()
    late.tensor("a.weight", (5, 7))
    assert torch.equal(late.tensor("b.weight", (5, 7)), source().tensor("b.weight", (5, 7)))
    assert not torch.equal(source().tensor("a.weight", (9,)), source().tensor("b.weight", (9,)))


@pytest.mark.parametrize(
    ("name", "shape", "mean"),
    [("mlp.weight", (64, 64), 0.0), ("norm.weight", (4096,), 1.0), ("q_proj.bias", (4096,), 0.0)],
)
def test_matrices_and_biases_lie_around_zero_and_scales_around_one(
    name: str, shape: tuple[int, ...], mean: float
) -> None:
    drawn = source().tensor(name, shape)
    assert drawn.mean().item() == pytest.approx(mean, abs=STD / 8)
    assert drawn.std().item() == pytest.approx(STD, rel=0.1)
