"""A forward as one compiled call against the same model in single ones: hidden states and KV."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from aserve.gpu.attention.torch_ref import TorchReference
from aserve.gpu.device.cpu import CpuDevice
from aserve.gpu.forward_batch import ForwardBatch, ForwardOverrides
from aserve.gpu.kv.layer_groups import group_layers
from aserve.gpu.kv.pools import KvPools
from aserve.gpu.layers.tiled_linear import prepare_tiled
from aserve.gpu.models.causal_model import CausalModel
from aserve.gpu.models.compiled_forward import FEW, CompiledForward, make_compiled_forward
from aserve.gpu.models.hidden_capture import HiddenCapture
from aserve.gpu.weights.target import Target
from aserve.messages import GroupSpec
from tests.gpu.device_tables import device_batch
from tests.load_model import load_model
from tests.parity.conftest import ReferenceOf
from tests.parity.references import MAX_MODEL_LEN
from tests.parity.test_forms import rounded

KINDS = (
    *("llama-biased", "llama-longrope", "qwen3-mixed", "gemma2", "gemma3"),
    *("phi3-longrope", "granite"),
)
# The rules of every fast form, relative in norm.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
PAGE_SIZE, MAX_ROWS = 4, 4
COLUMNS = -(-MAX_MODEL_LEN // PAGE_SIZE)


@dataclass
class Site:
    model: CausalModel
    pools: KvPools

    def plain(self, batch: ForwardBatch) -> Tensor:
        attention = TorchReference(self.pools)
        attend = attention.bind(batch, attention.plan(batch))
        return self.model.forward(batch.input_ids, batch.positions, attend)

    def compiled(self) -> CompiledForward:
        made = make_compiled_forward(self.model, self.pools)
        assert made is not None
        return made

    def parts(self) -> list[Tensor]:
        return [part for kv in self.pools.layers.values() for part in (kv.keys, kv.values)]


def site(directory: Path, dtype: torch.dtype) -> Site:
    """Pages of the rows lie scattered, and hold what an earlier step might have left there."""
    name = str(dtype).removeprefix("torch.")
    target = Target(prepare=prepare_tiled, elementwise=CpuDevice().elementwise(dtype))
    model = load_model(directory, dtype=name, max_model_len=MAX_MODEL_LEN, target=target)
    groups = group_layers(model.layers)
    num_pages = 1 + MAX_ROWS * COLUMNS
    pools = KvPools(
        groups,
        tuple(GroupSpec(group.name, num_pages, group.window) for group in groups),
        page_size=PAGE_SIZE,
        table_shape=(MAX_ROWS + 1, COLUMNS),
        dtype=dtype,
        device=torch.device("cpu"),
    )
    generator = torch.Generator().manual_seed(1)
    for table in pools.page_tables:
        pages = 1 + torch.randperm(num_pages - 1, generator=generator)
        table[1:] = pages.view(MAX_ROWS, COLUMNS)
    for kv in pools.layers.values():
        for part in (kv.keys, kv.values):
            part.copy_(torch.randn(part.shape, generator=generator).bfloat16())
    return Site(model, pools)


def distance(got: Tensor, expected: Tensor) -> float:
    return float((got.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.slow
@torch.inference_mode()
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_one_call_gives_the_hidden_states_and_kv_of_many(
    kind: str, dtype: torch.dtype, reference_of: ReferenceOf, tmp_path: Path
) -> None:
    """Prompts, chunks behind a prefix and decoding rows, shorter and longer than the windows."""
    directory = rounded(reference_of(kind), dtype, tmp_path)
    exact, here = site(directory, torch.float32), site(directory, dtype)
    shortcut = here.compiled()
    for spans, lens in (([1, 1, 1], [0, 30, 70]), ([19, 1, 3, 33], [0, 41, 25, 30])):
        batch = ForwardBatch.init_new(device_batch(spans, lens), here.pools)
        before = [part.clone() for part in here.parts()]
        expected = exact.plain(batch)
        got = shortcut.run(batch)
        assert got.dtype == dtype
        assert distance(got, expected) < TOLERANCES[dtype]
        for part, its_kv, old in zip(here.parts(), exact.parts(), before, strict=True):
            assert distance(part, its_kv) < TOLERANCES[dtype]
            is_kept = (its_kv == old.float()).all(dim=(1, 2))
            assert torch.equal(part[is_kept], old[is_kept])


@pytest.mark.slow
def test_what_it_cannot_do_is_left_to_the_model(reference_of: ReferenceOf) -> None:
    here = site(reference_of("llama-tied").directory, torch.float32)
    shortcut = here.compiled()

    made = device_batch([9], [0])
    plain = ForwardBatch.init_new(made, here.pools)
    watched = ForwardOverrides(capture=HiddenCapture(layer_ids=(0,)))
    assert shortcut.can_run(plain)
    assert not shortcut.can_run(ForwardBatch.init_new(made, here.pools, watched))
    long = replace(plain, input_ids=torch.zeros(FEW + 1, dtype=torch.int64))
    assert not shortcut.can_run(long)
    joint = site(reference_of("olmo2").directory, torch.float32)
    assert make_compiled_forward(joint.model, joint.pools) is None
