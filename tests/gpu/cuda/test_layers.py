"""Attention backends and the layers between the products on a device, against those in torch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aserve.engine import Answer, Engine
from aserve.gpu.device.cuda.ops import triton_elementwise, triton_store
from aserve.gpu.device.ops import TORCH_OPS, DeviceOps
from aserve.gpu.device.registry import open_device
from aserve.gpu.weights.source import Target
from aserve.tiny import MODEL_DIR
from tests.gpu.attention.backend_parity import SHAPES, Layout, assert_parity, layer
from tests.load_model import load_model
from tests.on_device import OnDevice
from tests.parity.dense_attend import DenseAttend

BACKENDS = ["paged-sdpa", "triton"]  # FlashInfer has a file of its own
LOGITS_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 6e-2}
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


@pytest.fixture
def where(device: str) -> Iterator[torch.device]:
    """What a test makes is there."""
    with OnDevice(torch.device(device)):
        yield torch.device(device)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_a_step_equals_the_reference(
    shape: str, backend: str, where: torch.device
) -> None:
    assert_parity(backend, Layout(layer(), dtype=torch.float32), shape)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("page_size", [1, 32, 64])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (16, None), (290, 2.0)])
def test_every_kind_of_layer_equals_the_reference(
    window: int | None,
    softcap: float | None,
    page_size: int,
    dtype: torch.dtype,
    backend: str,
    where: torch.device,
) -> None:
    spec = layer(heads=(6, 1), window=window, softcap=softcap)
    assert_parity(backend, Layout(spec, page_size, dtype), "mixed")


@torch.inference_mode()
def logits_of(directory: Path, ops: DeviceOps, where: torch.device, dtype: torch.dtype) -> Tensor:
    target = Target(device=where, elementwise=ops.elementwise)
    name = str(dtype).removeprefix("torch.")
    model = load_model(directory, load_format="dummy", dtype=name, target=target)
    tokens = torch.arange(7) * 5
    attend = DenseAttend(ops.rope_and_store_kv)
    return model.logits(model.forward(tokens, torch.arange(7), attend)).float()


def ops_of(name: str, dtype: torch.dtype) -> DeviceOps:
    """The operators of a device, or those of CUDA in Triton's interpreter."""
    if name != "triton":
        return open_device(name).ops(dtype, is_deterministic=False)
    return dataclasses.replace(
        TORCH_OPS, elementwise=triton_elementwise(dtype), rope_and_store_kv=triton_store(dtype)
    )


@pytest.mark.parametrize(
    ("device", "ops", "dtype"),
    [
        ("cpu", "cpu", torch.float32),
        ("cpu", "cpu", torch.bfloat16),
        ("cpu", "triton", torch.float32),
        pytest.param("cuda", "cuda", torch.float32, marks=pytest.mark.gpu),
        pytest.param("cuda", "cuda", torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_the_logits_of_torch(
    family: str, ops: str, dtype: torch.dtype, where: torch.device, tmp_path: Path
) -> None:
    """With the layers that the device has for this dtype."""
    config = {**SIZES, **FAMILIES[family], "architectures": [f"{family}ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = logits_of(tmp_path, TORCH_OPS, where, dtype)
    assert expected.std() > 0.01
    tolerance = LOGITS_TOLERANCES[dtype]
    got = logits_of(tmp_path, ops_of(ops, dtype), where, dtype)
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


PROMPTS = (
    "Once upon a time there was a",
    "The little dog ran to the",
    "def add(a, b):\n    return",
    "1 2 3 4 5 6",
)
NUM_TOKENS = 24
GREEDY = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "prompt_logprobs": 0}
# How much less likely than the best a chosen token may be, in logprob: its logits were rounded.
GAPS = {"float32": 0.01, "bfloat16": 0.35, "float16": 0.05}
IN_CHUNKS = {"max_num_batched_tokens": 5, "page_size": 1}
CASES: list[Any] = [
    ("cpu", "auto", "bfloat16", IN_CHUNKS),
    pytest.param("cuda", "auto", "float32", IN_CHUNKS, marks=pytest.mark.gpu),
]
CASES += [
    pytest.param("cuda", backend, dtype, {}, marks=pytest.mark.gpu)
    for backend in ("auto", "triton", "torch-ref")
    for dtype in GAPS
]


# The same of a model with rounded weights. On the CPU the largest gaps are 0, 0.11 and 2.1.
ROUNDED = {"int8": 0.5, "fp8": 0.7, "int4": 3.0}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ROUNDED)
def test_rounded_weights_choose_likely_tokens(name: str) -> None:
    machine: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "quantization": name}
    with Engine(model=str(MODEL_DIR), max_num_seqs=4, num_pages=500, **machine) as engine:
        found = engine.generate_sync(PROMPTS, **GREEDY)
    assert_best_by_the_cpu(found, gap=ROUNDED[name])


@pytest.mark.slow
@pytest.mark.parametrize(("device", "backend", "dtype", "options"), CASES)
def test_greedy_tokens_are_those_of_float32_on_the_cpu(
    device: str, backend: str, dtype: str, options: dict[str, Any]
) -> None:
    machine = {"device": device, "attention_backend": backend, "dtype": dtype, **options}
    with Engine(model=str(MODEL_DIR), max_num_seqs=4, num_pages=500, **machine) as engine:
        found = engine.generate_sync(PROMPTS, **GREEDY)
    assert_best_by_the_cpu(found, gap=GAPS[dtype])


def assert_best_by_the_cpu(found: list[Answer], *, gap: float, model_dir: Path = MODEL_DIR) -> None:
    """Each token is among the best of a recomputation of its whole text."""
    with Engine(model=str(model_dir), device="cpu", dtype="float32") as engine:
        for answer in found:
            (choice,) = answer.choices
            assert len(choice.token_ids) == NUM_TOKENS
            ids = [*(token.token_id for token in choice.prompt), *choice.token_ids]
            (whole,) = engine.generate_sync([ids], max_tokens=0, prompt_logprobs=1)
            for token in whole.choices[0].prompt[-NUM_TOKENS:]:
                assert token.logprob is not None
                assert token.top[0].logprob - token.logprob <= gap, (answer.text, token)
