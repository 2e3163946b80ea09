"""Loading through transformers: nothing may be missing, left over, foreign or too large."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from aserve.engine import Engine
from aserve.errors import ConfigError
from aserve.gpu.build import BuildOptions, build_executor
from aserve.gpu.layers.linear import Linear, LinearOp, prepare
from aserve.gpu.models.base import CausalModel
from aserve.gpu.weights.source import Target
from tests.gpu.models.transformers.tiny_configs import write_config, write_model
from tests.load_model import load_model
from tests.parity.dense_attend import DenseAttend

pytestmark = pytest.mark.slow  # importing transformers' models takes seconds

IDS = torch.tensor([3, 1, 20, 7])


@torch.inference_mode()
def logits_of(model: CausalModel) -> Tensor:
    return model.logits(model.forward(IDS, torch.arange(len(IDS)), DenseAttend()))


def refusal_of(directory: Path, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_model(directory, **options)
    return caught.value.message


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model.norm.weight": None}, "don't fit its config: missing: model.norm.weight"),
        ({"model.extra.weight": torch.zeros(2)}, "unexpected: model.extra.weight"),
        ({"model.norm.weight": torch.zeros(7)}, "model.norm.weight"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named_and_none_is_made_up(
    tmp_path: Path, changes: dict[str, Tensor | None], complaint: str
) -> None:
    path = write_model(tmp_path, "Cohere") / "model.safetensors"
    weights = {**load_file(path), **changes}
    kept = {name: weight for name, weight in weights.items() if weight is not None}
    save_file(kept, path, metadata={"format": "pt"})
    assert complaint in refusal_of(tmp_path)


def test_a_directory_without_weights_is_one_clear_error(tmp_path: Path) -> None:
    directory = write_config(tmp_path, "Cohere", "CohereForCausalLM")
    assert refusal_of(directory).startswith(f"the weights in {directory} cannot be read: ")


def test_dummy_weights_need_a_configuration_alone_and_are_the_same_each_time(
    tmp_path: Path,
) -> None:
    directory = write_config(tmp_path, "Starcoder2", "Starcoder2ForCausalLM")
    torch.manual_seed(5)
    first = logits_of(load_model(directory, load_format="dummy"))
    drawn = torch.rand(1)
    assert torch.equal(first, logits_of(load_model(directory, load_format="dummy")))
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(1)), "the process's own random numbers go on as before"


def test_a_model_larger_than_memory_is_refused_first(tmp_path: Path) -> None:
    directory = write_config(tmp_path, "Starcoder2", "Starcoder2ForCausalLM")
    message = refusal_of(directory, target=Target(memory_bytes=1000))
    assert "take a smaller dtype or a smaller model" in message


@pytest.mark.parametrize("model_type", ["own", "llama"])
def test_code_beside_a_checkpoint_is_never_run(model_type: str, tmp_path: Path) -> None:
    """Its class is known to nobody but its own file, which would leave a trace. The refusal says
    what to do instead."""
    (tmp_path / "modeling_own.py").write_text(f"open({str(tmp_path / 'trace')!r}, 'w')\n")
    kinds = {"AutoConfig": "OwnConfig", "AutoModelForCausalLM": "OwnForCausalLM"}
    own = {name: f"modeling_own.{code}" for name, code in kinds.items()}
    config = {"architectures": ["OwnForCausalLM"], "model_type": model_type, "auto_map": own}
    (tmp_path / "config.json").write_text(json.dumps(config))
    refusal = refusal_of(tmp_path)
    assert "OwnForCausalLM is not supported: its code is in the model's directory" in refusal
    assert "`aserve models` lists" in refusal
    assert not (tmp_path / "trace").exists()


def test_a_context_beyond_the_positions_is_refused(tmp_path: Path) -> None:
    directory = write_config(tmp_path, "OPT", "OPTForCausalLM", ffn_dim=40, word_embed_proj_dim=32)
    load_model(directory, load_format="dummy", max_model_len=64)
    assert "has positions for 1 to 64 tokens" in refusal_of(directory, max_model_len=65)


def test_quantized_checkpoints_are_refused(tmp_path: Path) -> None:
    quantized = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    directory = write_config(tmp_path, "Cohere", "CohereForCausalLM", **quantized)
    assert "quantized checkpoints are unsupported" in refusal_of(directory)


def test_linear_layers_get_the_form_that_the_device_wants(tmp_path: Path) -> None:
    """All of them, once each, and what comes out of that form is what counts."""
    directory = write_model(tmp_path, "Cohere")
    shapes: list[tuple[int, ...]] = []

    def noting(linear: Linear, device: torch.device, /, *, dtype: torch.dtype) -> LinearOp:
        shapes.append(tuple(linear.weight.shape))
        return prepare(Linear(2 * linear.weight), device, dtype=dtype)

    other = load_model(directory, target=Target(prepare=noting))
    assert len(shapes) == 2 * 7 + 1
    assert not torch.allclose(logits_of(other), logits_of(load_model(directory)))


def test_a_device_that_runs_out_of_memory_is_not_the_architecture_s_fault(tmp_path: Path) -> None:
    def full(_linear: Linear, _device: torch.device, /, *, dtype: torch.dtype) -> LinearOp:
        raise torch.OutOfMemoryError(f"no room for {dtype}")

    directory = write_config(tmp_path, "Starcoder2", "Starcoder2ForCausalLM")
    with pytest.raises(torch.OutOfMemoryError):
        load_model(directory, load_format="dummy", target=Target(prepare=full))


def test_layers_that_have_a_dtype_of_their_own_keep_it(tmp_path: Path) -> None:
    """The router of this mixture is in float32, whatever the rest is in."""
    experts = {"num_experts": 4, "moe_topk": 2, "head_dim": 8}
    directory = write_config(tmp_path, "HunYuanMoEV1", "HunYuanMoEV1ForCausalLM", **experts)
    model = load_model(directory, dtype="bfloat16", load_format="dummy")
    assert model.dtype == torch.bfloat16
    assert logits_of(model).isfinite().all()


def test_code_that_may_mix_tokens_is_refused_where_bits_must_not_depend_on_the_step(
    tmp_path: Path,
) -> None:
    directory = write_config(tmp_path, "Starcoder2", "Starcoder2ForCausalLM")
    options = BuildOptions(directory, load_format="dummy", deterministic=True)
    with pytest.raises(ConfigError, match="needs a model with native code; with transformers code"):
        build_executor(options)


async def test_an_engine_answers_with_it_past_the_window(tmp_path: Path) -> None:
    directory = write_config(tmp_path, "Starcoder2", "Starcoder2ForCausalLM", sliding_window=8)
    async with Engine(model=directory, load_format="dummy", num_pages=20) as engine:
        answer = await engine.answer([3, 1, 20], max_tokens=30, temperature=0, ignore_eos=True)
    assert len(answer.choices[0].token_ids) == 30
