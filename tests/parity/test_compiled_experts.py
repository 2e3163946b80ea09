"""Mixtures of experts in a forward of one compiled call, against the same model in single ones:
hidden states and KV.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from aserve.gpu.build import BuildOptions, build_executor
from aserve.gpu.device.cpu import fused_decoder
from aserve.gpu.device.cpu.fused_decoder import make_compiled_forward
from aserve.gpu.device.cpu.kernel_linear import (
    prepare_bf16_stored,
    prepare_experts,
    prepare_quantized,
)
from aserve.gpu.device.cpu.linear import LinearPerExpert, PerToken
from aserve.gpu.layers.clamped import ClampedActivation
from aserve.gpu.layers.mlp import GatedMlp
from aserve.gpu.layers.plain_mlp import PlainMlp
from aserve.gpu.lora.tables import LoraLinear
from aserve.gpu.models.base import HiddenCapture
from aserve.gpu.models.decoder import Attention, Block, Decoder
from aserve.gpu.moe.layer import ExpertMlp, GatedExperts
from aserve.gpu.parallel.shared import SharedCollectives
from aserve.gpu.parallel.source import SummedLinear
from aserve.gpu.replace_weights import copies
from aserve.gpu.step.forward_batch import ForwardBatch, ForwardOverrides
from aserve_kernels.cpu.decoder_forward import decoder_step
from tests.gpu.device_tables import device_batch
from tests.gpu.drive import Served, request, serve
from tests.parity.conftest import ReferenceOf
from tests.parity.test_compiled_forward import (
    EXPERT_KINDS,
    TOLERANCES,
    Site,
    distance,
    site,
    streams_of,
)
from tests.parity.test_forms import rounded

# One row, whose experts have a row each; decoding rows; and chunks, of which most experts have
# several rows.
FORWARDS = (([1], [30]), ([1, 1, 1], [0, 30, 70]), ([19, 1, 3, 33], [0, 41, 25, 30]))
# Beside TOLERANCES. In bfloat16 the single calls of gpt-oss are 0.038 away from float32, and with
# weights of 4 bits so many of its few tokens go to other experts that no bound says anything.
WIDER = {("gpt-oss", torch.bfloat16): 5e-2}
FEW_BITS = [
    (kind, bits, dtype)
    for kind, bits, dtype in product(("glm4-moe", "gpt-oss"), (8, 4), TOLERANCES)
    if (kind, bits, dtype) != ("gpt-oss", 4, torch.bfloat16)
]


@pytest.mark.slow
@torch.inference_mode()
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("kind", EXPERT_KINDS)
def test_one_call_gives_the_hidden_states_and_kv_of_many(
    kind: str, dtype: torch.dtype, reference_of: ReferenceOf, tmp_path: Path
) -> None:
    directory = rounded(reference_of(kind), dtype, tmp_path)
    tolerance = WIDER.get((kind, dtype), TOLERANCES[dtype])
    assert_equal_forwards(site(directory, dtype), site(directory, torch.float32), tolerance)


@pytest.mark.slow
@torch.inference_mode()
def test_experts_that_are_multiplied_together_elsewhere_are_read_one_by_one(
    reference_of: ReferenceOf,
) -> None:
    directory, dtype = reference_of("qwen2-moe").directory, torch.float32
    here, plain = (site(directory, dtype, prepare_grouped=prepare_experts) for _ in range(2))
    assert_equal_forwards(here, plain, TOLERANCES[dtype])


@pytest.mark.slow
@torch.inference_mode()
def test_experts_of_bfloat16_are_widened_in_one_call(reference_of: ReferenceOf) -> None:
    directory, kv_dtype = reference_of("qwen3-moe").directory, torch.bfloat16
    here, plain = (
        site(directory, torch.float32, prepare_bf16_stored, kv_dtype=kv_dtype) for _ in range(2)
    )
    assert_equal_forwards(here, plain, 1e-3)


@pytest.mark.slow
@torch.inference_mode()
@pytest.mark.parametrize(("kind", "bits", "dtype"), FEW_BITS)
def test_experts_of_few_bits_are_multiplied_in_one_call(
    kind: str, bits: int, dtype: torch.dtype, reference_of: ReferenceOf
) -> None:
    """An input that differs in its last bit may become another integer of 8 bits, also in float32,
    and send its token to another expert."""
    directory = reference_of(kind).directory
    here, plain = (site(directory, dtype, prepare_quantized(bits)) for _ in range(2))
    assert_equal_forwards(here, plain, 1e-1)


@pytest.mark.slow
@torch.inference_mode()
def test_gates_and_ups_are_clamped_in_one_call(reference_of: ReferenceOf) -> None:
    """The limit of the reference model is far from its values."""
    directory, dtype = reference_of("gpt-oss").directory, torch.float32
    here, plain, near, far = (site(directory, dtype) for _ in range(4))
    for own in (here, plain, near):
        assert isinstance(own.model, Decoder)
        for block in own.model.blocks:
            assert isinstance(block.mlp, ExpertMlp)
            assert isinstance(block.mlp.experts, GatedExperts)
            block.mlp.experts.gated = ClampedActivation(1.5, 0.1)
    batch = ForwardBatch.init_new(device_batch([1, 7], [30, 0]), here.pools)
    assert distance(near.plain(batch), far.plain(batch)) > 0.01
    assert_equal_forwards(here, plain, TOLERANCES[dtype])


def assert_equal_forwards(here: Site, plain: Site, tolerance: float) -> None:
    """`here` runs them in one call each."""
    fused_step = here.compiled()
    for query_lens, lens in FORWARDS:
        batch = ForwardBatch.init_new(device_batch(query_lens, lens), here.pools)
        wanted, found = (HiddenCapture((0, 1), wants_before_norm=True) for _ in range(2))
        expected = plain.plain(batch.overridden(ForwardOverrides(capture=wanted)))
        got = fused_step.run(batch.overridden(ForwardOverrides(capture=found)))
        pairs = [
            *zip(streams_of(found, got), streams_of(wanted, expected), strict=True),
            *zip(here.parts(), plain.parts(), strict=True),
        ]
        measure = distance if here.model.dtype == torch.float32 else distance_of_most
        assert max(measure(own, other) for own, other in pairs) < tolerance


def distance_of_most(got: Tensor, expected: Tensor) -> float:
    """Leaves out a fifth of the vectors. What bfloat16 rounds may send a token to another expert,
    here as in single calls."""
    apart = (got.float() - expected.float()).flatten(1).norm(dim=1)
    alike = apart.argsort()[: -(-4 * len(apart) // 5)]
    return distance(got[alike], expected[alike])


@pytest.mark.slow
@torch.inference_mode()
@pytest.mark.parametrize("form", ["tiles", "tiles of all experts", "codes"])
@pytest.mark.parametrize("kind", ["glm4-moe", "gpt-oss"])
def test_new_weights_reach_experts_in_one_call(
    kind: str, form: str, reference_of: ReferenceOf, tmp_path: Path
) -> None:
    directory = reference_of(kind).directory
    given: dict[str, dict[str, Any]] = {
        "tiles": {},
        "tiles of all experts": {"prepare_grouped": prepare_experts},
        "codes": {"prepare": prepare_quantized(8)},
    }
    other = scaled(directory, tmp_path)
    here, new = (site(own, torch.float32, **given[form]) for own in (directory, other))
    fused_step = here.compiled()
    batch = ForwardBatch.init_new(device_batch([1, 7], [30, 0]), here.pools)
    before, expected = fused_step.run(batch), new.plain(batch)
    for copy in list(copies(here.model, new.model)):
        copy()
    assert distance(before, expected) > 0.01
    assert distance(fused_step.run(batch), expected) < 1e-3


def scaled(directory: Path, into: Path) -> Path:
    """Writes a copy of a model, with another factor for each row of a weight."""
    weights = load_file(directory / "model.safetensors")
    for name, tensor in weights.items():
        factors = torch.linspace(0.5, 1.5, len(tensor))
        weights[name] = tensor * factors.view(-1, *[1] * (tensor.ndim - 1))
    save_file(weights, into / "model.safetensors")
    (into / "config.json").write_bytes((directory / "config.json").read_bytes())
    return into


def with_adapters(layer: ExpertMlp, block: Block) -> None:
    assert isinstance(block.mixer, Attention)
    block.mixer.out = LoraLinear(block.mixer.out, Mock(), Mock())


def with_ranks(layer: ExpertMlp, block: Block) -> None:
    layer.dispatcher = Mock()


def with_sums(layer: ExpertMlp, block: Block) -> None:
    assert layer.shared is not None
    assert isinstance(layer.shared.mlp, GatedMlp)
    down = layer.shared.mlp.down
    layer.shared.mlp.down = SummedLinear(down, None, Mock(spec=SharedCollectives))


def with_plain_products(layer: ExpertMlp, block: Block) -> None:
    assert isinstance(layer.experts, GatedExperts)
    assert isinstance(layer.experts.down, LinearPerExpert)
    first, *others = layer.experts.down.experts
    layer.experts.down.experts = (PerToken(first), *others)


def with_joined_products(layer: ExpertMlp, block: Block) -> None:
    assert isinstance(layer.experts, GatedExperts)
    layer.experts.gate_up = Mock()


def with_another_activation(layer: ExpertMlp, block: Block) -> None:
    assert isinstance(layer.experts, GatedExperts)
    layer.experts.gated = Mock()


def with_clamps_in_experts_alone(layer: ExpertMlp, block: Block) -> None:
    assert isinstance(layer.experts, GatedExperts)
    layer.experts.gated = ClampedActivation(1.7, 7.0)


def with_a_plain_mlp(layer: ExpertMlp, block: Block) -> None:
    assert layer.shared is not None
    layer.shared.mlp = PlainMlp(Mock(), Mock(), "relu2")


def with_identities(layer: ExpertMlp, block: Block) -> None:
    layer.spec = msgspec.structs.replace(layer.spec, num_identity=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        *(with_adapters, with_ranks, with_sums, with_plain_products, with_joined_products),
        *(with_another_activation, with_clamps_in_experts_alone, with_a_plain_mlp),
        with_identities,
    ],
)
def test_what_the_kernel_cannot_do_is_left_to_the_model(
    change: Callable[[ExpertMlp, Block], None], reference_of: ReferenceOf
) -> None:
    here = site(reference_of("qwen2-moe").directory, torch.float32)
    assert make_compiled_forward(here.model, here.state) is not None
    assert isinstance(here.model, Decoder)
    block = here.model.blocks[1]
    assert isinstance(block.mlp, ExpertMlp)
    change(block.mlp, block)
    assert make_compiled_forward(here.model, here.state) is None


ONE_CALL = (
    *(*EXPERT_KINDS, "qwen3.5-moe", "lfm2-moe", "granite-hybrid", "granite-moe"),
    *("nemotron-h", "nemotron-h-dense", "falcon-h1"),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "is_one_call"), [*dict.fromkeys(ONE_CALL, True).items(), ("deepseek3", False)]
)
def test_steps_of_a_server_are_one_call(
    kind: str, is_one_call: bool, reference_of: ReferenceOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers with latent attention run operator by operator."""
    step = Mock(side_effect=decoder_step)
    monkeypatch.setattr(fused_decoder, "decoder_step", step)
    directory = reference_of(kind).directory

    def served(dtype: str) -> Served:
        options = BuildOptions(directory, dtype=dtype, num_pages=60, max_rows=4)
        prompts = [[5, 9, 2], [*range(40)], [7]]
        asks = [request(f"r{n}", prompt, max_tokens=9) for n, prompt in enumerate(prompts)]
        return serve(build_executor(options), asks, chaos=3)

    expected = served("float64")
    assert step.call_count == 0
    found = served("float32")
    assert found.outputs == expected.outputs
    assert step.call_count == (len(found.batches) if is_one_call else 0)
