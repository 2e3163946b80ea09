"""Recurrent layers in a forward of one compiled call, against the same model in single ones: hidden
states, KV and states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from aserve.gpu.attention.recurrent import RecurrentBackend
from aserve.gpu.attention.reference import TorchReference
from aserve.gpu.device.cpu.fused_decoder import make_compiled_forward
from aserve.gpu.device.cpu.kernel_linear import prepare_quantized, prepare_tiled
from aserve.gpu.layers.linear import LinearOp, Prepare
from aserve.gpu.layers.mlp import GatedMlp
from aserve.gpu.layers.plain_mlp import PlainMlp
from aserve.gpu.lora.tables import LoraLinear
from aserve.gpu.models.base import HiddenCapture
from aserve.gpu.models.decoder import Decoder
from aserve.gpu.models.gated_attention import GatedAttention
from aserve.gpu.models.gated_delta import GatedDeltaNet
from aserve.gpu.models.recurrent import recurrent_layers_of
from aserve.gpu.parallel.shared import SharedCollectives
from aserve.gpu.parallel.source import SummedLinear
from aserve.gpu.step.forward_batch import ForwardBatch, ForwardOverrides
from aserve_kernels.delta_rule import DeltaStates, advance_rows_ref
from tests.gpu.device_tables import device_batch
from tests.parity.conftest import ReferenceOf
from tests.parity.test_compiled_forward import (
    MAX_ROWS,
    RECURRENT_KINDS,
    Site,
    distance,
    site,
    streams_of,
)
from tests.parity.test_forms import rounded

# The rules of every fast form, relative in norm. What bfloat16 rounds is multiplied by recurrence:
# the single calls are up to 0.055 away from float32.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 6e-2}
# What bfloat16 rounds sends tokens of these to other experts, more or fewer by processor.
MIXTURES = ("qwen3.5-moe", "lfm2-moe", "granite-hybrid", "nemotron-h")
UNSTABLE = [(kind, torch.bfloat16) for kind in MIXTURES]
# The tokens of rows 1, 2, ..., and how many each has before: prompts, and rows that begin beside
# chunks and decodes.
FORWARDS = (([7, 2], [0, 0]), ([5, 1, 19], [7, 2, 0]), ([1, 1, 1, 1], [12, 3, 19, 0]))
# And windows, of which some of the tokens are rejected.
WINDOWS = (*FORWARDS, ([3, 3, 2], [13, 4, 20]), ([3, 1, 3], [14, 6, 22]))


class RecurrentSite(Site):
    """States hold NaN of former owners."""

    def __init__(self, made: Site, num_places: int = 1) -> None:
        states: dict[int, DeltaStates] = {}
        for layer in recurrent_layers_of(made.model):
            shape, dtype = layer.shape, made.model.dtype
            matrices = (MAX_ROWS + 1, num_places, *shape.matrix_sizes)
            width = num_places + shape.num_taps - 1
            inputs = (MAX_ROWS + 1, width, shape.num_channels)
            states[layer.index] = DeltaStates(
                torch.full(matrices, torch.nan), torch.full(inputs, torch.nan, dtype=dtype)
            )
        super().__init__(made.model, replace(made.state, recurrent=states))

    def plain(self, batch: ForwardBatch) -> Tensor:
        inner = TorchReference(self.pools)
        attention = RecurrentBackend(inner, self.state.recurrent, advance_rows_ref)
        attend = attention.bind(batch, attention.plan(batch))
        return self.model.forward(
            batch.input_ids, batch.rope_positions, attend, capture=batch.capture
        )

    def states(self, num_rows: int) -> list[Tensor]:
        """Of the rows 1, 2, ...; 7 stands for what no token has written."""
        own = slice(1, num_rows + 1)
        tables = self.state.recurrent.values()
        parts = [part for table in tables for part in (table.matrices, table.inputs)]
        return [part[own].nan_to_num(7) for part in parts]


def recurrent_site(
    directory: Path,
    dtype: torch.dtype,
    prepare: Prepare = prepare_tiled,
    num_places: int = 1,
) -> RecurrentSite:
    return RecurrentSite(site(directory, dtype, prepare), num_places)


@pytest.mark.slow
@torch.inference_mode()
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [pair for pair in product(RECURRENT_KINDS, TOLERANCES) if pair not in UNSTABLE],
)
def test_one_call_gives_the_hidden_states_and_states_of_many(
    kind: str, dtype: torch.dtype, reference_of: ReferenceOf, tmp_path: Path
) -> None:
    directory = rounded(reference_of(kind), dtype, tmp_path)
    exact, here = recurrent_site(directory, torch.float32), recurrent_site(directory, dtype)
    assert_equal_forwards(here, exact, FORWARDS, TOLERANCES[dtype])


@pytest.mark.slow
@torch.inference_mode()
@pytest.mark.parametrize(
    "kind",
    [
        *("qwen3-next-dense", "lfm2", "granite-hybrid-dense"),
        *("nemotron-h-dense", "falcon-h1"),
    ],
)
def test_a_forward_in_one_call_begins_before_tokens_that_were_rejected(
    kind: str, reference_of: ReferenceOf
) -> None:
    directory, dtype = reference_of(kind).directory, torch.float32
    here, plain = (recurrent_site(directory, dtype, num_places=3) for _ in range(2))
    assert_equal_forwards(here, plain, WINDOWS, TOLERANCES[dtype])


@pytest.mark.slow
@torch.inference_mode()
def test_weights_of_8_bits_are_multiplied_in_one_call(reference_of: ReferenceOf) -> None:
    directory, dtype = reference_of("qwen3.5-interval").directory, torch.float32
    here, plain = (recurrent_site(directory, dtype, prepare_quantized(8)) for _ in range(2))
    assert_equal_forwards(here, plain, FORWARDS, 1e-3)


def assert_equal_forwards(
    here: RecurrentSite,
    plain: RecurrentSite,
    forwards: Iterable[tuple[list[int], list[int]]],
    tolerance: float,
) -> None:
    """`here` runs them in one call each."""
    fused_step = here.compiled()
    for query_lens, lens in forwards:
        batch = ForwardBatch.init_new(device_batch(query_lens, lens), here.pools)
        wanted, found = (HiddenCapture((0, 1), wants_before_norm=True) for _ in range(2))
        expected = plain.plain(batch.overridden(ForwardOverrides(capture=wanted)))
        got = fused_step.run(batch.overridden(ForwardOverrides(capture=found)))
        pairs = [
            *zip(streams_of(found, got), streams_of(wanted, expected), strict=True),
            *zip(here.parts(), plain.parts(), strict=True),
            *zip(here.states(len(lens)), plain.states(len(lens)), strict=True),
        ]
        assert max(distance(own, other) for own, other in pairs) < tolerance


def with_adapters(mixer: GatedAttention | GatedDeltaNet) -> LinearOp:
    return LoraLinear(mixer.out, Mock(), Mock())


def with_divided_adapters(mixer: GatedAttention | GatedDeltaNet) -> LinearOp:
    return SummedLinear(with_adapters(mixer), None, Mock(spec=SharedCollectives))


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("wrap", [with_adapters, with_divided_adapters])
def test_adapters_are_left_to_the_model(
    wrap: Callable[[Any], LinearOp], index: int, reference_of: ReferenceOf
) -> None:
    """Layer 0 is recurrent, and layer 1 has attention."""
    here = recurrent_site(reference_of("qwen3.5").directory, torch.float32)
    assert make_compiled_forward(here.model, here.state) is not None
    assert isinstance(here.model, Decoder)
    mixer = here.model.blocks[index].mixer
    assert isinstance(mixer, GatedAttention | GatedDeltaNet)
    mixer.out = wrap(mixer)
    assert make_compiled_forward(here.model, here.state) is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["granite-hybrid-dense", "nemotron-h-dense"])
def test_mamba_layers_of_several_ranks_are_left_to_the_model(
    kind: str, reference_of: ReferenceOf
) -> None:
    """Each rank has them whole, so that a sum over the ranks would count them twice."""
    here = recurrent_site(reference_of(kind).directory, torch.float32)
    assert make_compiled_forward(here.model, here.state) is not None
    assert isinstance(here.model, Decoder)
    mlps = [block.mlp for block in here.model.blocks]
    for mlp in [mlp for mlp in mlps if isinstance(mlp, GatedMlp | PlainMlp)]:
        mlp.down = SummedLinear(mlp.down, None, Mock(spec=SharedCollectives))
    assert make_compiled_forward(here.model, here.state) is None


@pytest.mark.slow
def test_states_that_the_kernel_cannot_read_are_left_to_the_model(
    reference_of: ReferenceOf,
) -> None:
    here = recurrent_site(reference_of("qwen3.5").directory, torch.float32)
    narrow = DeltaStates(torch.zeros(2, 1, 4, 8, 12), torch.zeros(2, 4, 80))
    state = replace(here.state, recurrent={**here.state.recurrent, 0: narrow})
    assert make_compiled_forward(here.model, state) is None
