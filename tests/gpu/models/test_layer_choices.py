"""A decoder's layers may differ in their mixer and in their MLP; a forward never waits."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from aserve.gpu.build import BuildOptions, assemble
from aserve.gpu.decode.autoregressive import Autoregressive
from aserve.gpu.device.cpu.device import CpuDevice
from aserve.gpu.device.cpu.fused_decoder import make_compiled_forward
from aserve.gpu.device.cpu.kernel_linear import prepare_tiled
from aserve.gpu.kv.layer_groups import AttentionInputs, LayerSpec
from aserve.gpu.layers.rope import apply_rope
from aserve.gpu.models.base import Attend, CausalModel
from aserve.gpu.models.config.fields import Fields
from aserve.gpu.models.config.model import parse_config
from aserve.gpu.models.decoder import Attention, Decoder, gated_mlp
from aserve.gpu.models.decoder_spec import DecoderSpec, MakeMixer, MakeMlp
from aserve.gpu.models.families.llama import llama
from aserve.gpu.sampling.params import RowTables
from aserve.gpu.step.future_map import FutureMap
from aserve.gpu.step.resolve import DeviceState
from aserve.gpu.weights.dummy import DummyWeights
from aserve.gpu.weights.inventory import Inventory
from aserve.gpu.weights.source import HOST, LoadProgress, Target, WeightSource
from tests.gpu.device_tables import CPU, make_pools
from tests.gpu.weights.checkpoints import CONFIG, llama_weights, write_checkpoint
from tests.load_model import load_model
from tests.parity.dense_attend import DenseAttend

NUM_EXPERTS, EXPERT_SIZE = 4, 6
IDS = torch.tensor([3, 1, 20, 7])


class TopOneExperts:
    """A mixture of experts in which a router picks one expert for each token."""

    def __init__(self, index: int, spec: DecoderSpec, weights: WeightSource, /) -> None:
        hidden, prefix = spec.config.hidden_size, f"model.layers.{index}.mlp"
        gate = {f"{prefix}.gate": NUM_EXPERTS}
        self._router = weights.linear(gate, in_features=hidden, bias=False)
        stacked = partial(weights.stacked, f"{prefix}.experts", count=NUM_EXPERTS)
        up = stacked({"up_proj": EXPERT_SIZE}, in_features=hidden)
        down = stacked({"down_proj": hidden}, in_features=EXPERT_SIZE)
        assert isinstance(up, Tensor)
        assert isinstance(down, Tensor)
        self._up, self._down = up, down

    def __call__(self, x: Tensor, /) -> Tensor:
        best = self._router(x).argmax(dim=1)
        inner = torch.einsum("th,trh->tr", x, self._up[best]).relu()
        return torch.einsum("tr,thr->th", inner, self._down[best])


class ScaleMixer:
    """A mixer without attention: it keeps nothing in the KV cache."""

    layer: LayerSpec | None = None

    def __init__(self, index: int, spec: DecoderSpec, weights: WeightSource, /) -> None:
        size = spec.config.hidden_size
        self._scale = weights.tensor(f"model.layers.{index}.mixer.weight", (size,))

    def __call__(self, x: Tensor, _cos_sin: Tensor, _attend: Attend, /) -> Tensor:
        return x * self._scale


def spec_of(mixers: tuple[MakeMixer, ...] = (), mlps: tuple[MakeMlp, ...] = ()) -> DecoderSpec:
    config = parse_config(Fields(CONFIG, source="config"), defaults={})
    return msgspec.structs.replace(llama(config), mixers=mixers, mlps=mlps)


def build(spec: DecoderSpec, target: Target = HOST) -> Decoder:
    progress = LoadProgress(0, dtype=torch.float32)
    weights = DummyWeights(target, dtype=torch.float32, progress=progress)
    return Decoder(spec, weights, max_model_len=16)


def hidden_of(model: Decoder) -> Tensor:
    return model.forward(IDS, torch.arange(len(IDS)), DenseAttend())


def test_each_layer_has_the_mlp_that_the_spec_names_for_it() -> None:
    plain = build(spec_of())
    mixed = build(spec_of(mlps=(gated_mlp, TopOneExperts)))
    assert [type(block.mlp).__name__ for block in mixed.blocks] == ["GatedMlp", "TopOneExperts"]
    assert hidden_of(mixed).isfinite().all()
    assert not torch.equal(hidden_of(mixed), hidden_of(plain))
    explicit = build(spec_of(mlps=(gated_mlp,) * 2, mixers=(Attention,) * 2))
    assert torch.equal(hidden_of(explicit), hidden_of(plain))


def test_the_inventory_lists_the_weights_of_every_kind_of_layer() -> None:
    inventory = Inventory(torch.float32)
    spec = spec_of(mixers=(ScaleMixer, Attention), mlps=(gated_mlp, TopOneExperts))
    Decoder(spec, inventory, max_model_len=1)
    assert inventory.shapes["model.layers.1.mlp.experts.3.down_proj.weight"] == (8, EXPERT_SIZE)
    assert "model.layers.0.mlp.experts.3.down_proj.weight" not in inventory.shapes
    assert "model.layers.1.mlp.gate_proj.weight" not in inventory.shapes
    assert "model.layers.0.mixer.weight" in inventory.shapes
    assert "model.layers.0.self_attn.q_proj.weight" not in inventory.shapes


def test_only_layers_that_keep_kv_have_a_place_in_the_cache() -> None:
    model = build(spec_of(mixers=(ScaleMixer, Attention)))
    assert [layer.index for layer in model.layers] == [1]
    assert hidden_of(model).isfinite().all()
    options = BuildOptions(Path(), num_pages=8, max_rows=2, max_model_len=16)
    executor = assemble(model, Autoregressive(), CpuDevice(), options)
    assert sum(group.num_pages for group in executor.spec.groups) == 8


@pytest.mark.slow
def test_a_fused_step_leaves_other_layers_to_the_decoder() -> None:
    ops = CpuDevice().ops(torch.float32, is_deterministic=False)
    tiled = Target(prepare=prepare_tiled, elementwise=ops.elementwise)
    plain = build(spec_of(), tiled)
    assert make_compiled_forward(plain, state_of(plain)) is not None
    for spec in (spec_of(mixers=(Attention, ScaleMixer)), spec_of(mlps=(TopOneExperts, gated_mlp))):
        mixed = build(spec, tiled)
        assert make_compiled_forward(mixed, state_of(mixed)) is None


def state_of(model: Decoder) -> DeviceState:
    pools = make_pools(model.layers, 8, table_shape=(3, 5), dtype=model.dtype)
    relay = FutureMap((), max_rows=2, device=CPU)
    return DeviceState(pools, RowTables(max_rows=2, device=CPU), relay)


FEW_IDS = torch.tensor([5, 0, 23])
POSITIONS = torch.arange(3)


@pytest.fixture
def model(tmp_path: Path) -> CausalModel:
    return load_model(write_checkpoint(tmp_path, llama_weights()))


def test_no_tokens_give_no_logits(model: CausalModel) -> None:
    def attend(layer: LayerSpec, inputs: AttentionInputs) -> Tensor:
        return torch.empty_like(inputs.heads[:, : layer.num_heads])

    empty = torch.empty(0, dtype=torch.int64)
    assert model.logits(model.forward(empty, empty, attend)).shape == (0, 24)


class NoHostReads(TorchDispatchMode):
    """Fails where a value of the device would have to reach the host; counts the other calls."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        assert func is not torch.ops.aten._local_scalar_dense.default
        self.num_calls += 1
        return func(*args, **(kwargs or {}))


def test_a_forward_never_waits_for_the_device(model: CausalModel) -> None:
    def attend(layer: LayerSpec, inputs: AttentionInputs) -> Tensor:
        assert inputs.rope is not None
        return apply_rope(inputs.heads[:, : -layer.num_kv_heads], inputs.rope)[:, : layer.num_heads]

    with NoHostReads() as mode, torch.inference_mode():
        model.logits(model.forward(FEW_IDS, POSITIONS, attend))
    assert mode.num_calls > 0
