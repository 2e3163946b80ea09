"""Attention backends and the layers between the products on a device, against those in torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from aserve.gpu.device.ops import TORCH_OPS, DeviceOps
from aserve.gpu.device.registry import open_device
from aserve.gpu.weights.source import Target
from tests.gpu.attention.backend_parity import SHAPES, Layout, assert_parity, layer
from tests.gpu.layers.test_triton_elementwise import FAMILIES, SIZES
from tests.load_model import load_model
from tests.on_device import OnDevice
from tests.parity.dense_attend import DenseAttend

BACKENDS = ["paged-sdpa", "triton"]  # FlashInfer has a file of its own
LOGITS_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 6e-2}


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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", LOGITS_TOLERANCES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_the_logits_of_torch(
    family: str, dtype: torch.dtype, device: str, where: torch.device, tmp_path: Path
) -> None:
    """With the layers that the device has for this dtype."""
    config = {**SIZES, **FAMILIES[family], "architectures": [f"{family}ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = logits_of(tmp_path, TORCH_OPS, where, dtype)
    assert expected.std() > 0.01
    ops = open_device(device).ops(dtype, is_deterministic=False)
    got = logits_of(tmp_path, ops, where, dtype)
    tolerance = LOGITS_TOLERANCES[dtype]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
