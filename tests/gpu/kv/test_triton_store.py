"""The Triton rope-and-store kernel: it equals torch, and it is one launch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from aserve.gpu.device.cuda.ops import triton_store
from aserve.gpu.kv.layer_groups import AttentionInputs
from aserve.gpu.kv.store import rope_then_store_kv
from aserve.gpu.layers.norm import HeadNorms
from aserve.gpu.layers.rope import RopeInputs
from aserve_kernels import rope_and_store_kv
from tests.gpu.attention.backend_parity import layer
from tests.gpu.kv.test_store import FP8, pools_of

SLOTS = torch.tensor([9, 2, 30])
QUARTER = torch.tensor([[0.0, 1.0, 1.0, 0.0]]).repeat(3, 1)  # rotates two of four pairs, exactly
ROPES = {
    "none": None,
    "turned": RopeInputs(QUARTER),
    "normed": RopeInputs(QUARTER, HeadNorms(torch.ones(6, 8), eps=1e-6)),
}


@pytest.mark.parametrize("dtype", [FP8, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rope", [ROPES["none"], ROPES["turned"]], ids=["none", "turned"])
def test_the_kernel_stores_what_torch_stores(rope: RopeInputs | None, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    heads = torch.randint(-15, 16, (3, 8, 8), generator=generator).float()  # exact in all
    heads = heads.transpose(1, 2).contiguous().transpose(1, 2)  # they lie apart
    plain, kernel = (pools_of(dtype, scales=(0.5, 4.0)).layers[0] for _ in range(2))
    queries = plain.rope_and_store_kv(layer(), AttentionInputs(heads, rope), SLOTS)
    kernel = dataclasses.replace(kernel, store=triton_store(torch.float32))
    assert torch.equal(
        kernel.rope_and_store_kv(layer(), AttentionInputs(heads, rope), SLOTS), queries
    )
    assert torch.equal(kernel.keys.float(), plain.keys.float())
    assert torch.equal(kernel.values.float(), plain.values.float())


class Launches:
    """Replaces the kernel and counts its launches in `num`."""

    def __init__(self) -> None:
        self.num = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._launch

    def _launch(self, *_: object) -> None:
        self.num += 1


class Calls(TorchDispatchMode):
    """Records the names of the torch operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if not func.is_view:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_a_layer_ropes_and_stores_in_one_launch_and_nothing_else(
    rope: RopeInputs | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = Launches()
    monkeypatch.setattr(rope_and_store_kv, "_rope_and_store", launches)
    kv = dataclasses.replace(pools_of(torch.bfloat16).layers[0], store=triton_store(torch.bfloat16))
    heads = torch.zeros((3, 8, 8), dtype=torch.bfloat16)
    with Calls() as calls:
        kv.rope_and_store_kv(layer(), AttentionInputs(heads, rope), SLOTS)
    assert launches.num == 1
    assert set(calls.names) <= {"new_empty", "empty"}


def test_float64_is_left_to_torch() -> None:
    assert triton_store(torch.float64) is rope_then_store_kv
