"""A forward as one compiled call against the same model in single ones: hidden states and KV."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

from aserve.gpu.attention.reference import TorchReference
from aserve.gpu.build import BuildOptions, assemble
from aserve.gpu.decode.autoregressive import Autoregressive
from aserve.gpu.device.cpu import fused_decoder, team_choice
from aserve.gpu.device.cpu.device import CpuDevice
from aserve.gpu.device.cpu.fused_decoder import FEW_TOKENS, CompiledForward, make_compiled_forward
from aserve.gpu.device.cpu.kernel_linear import (
    prepare_bf16_stored,
    prepare_quantized,
    prepare_tiled,
)
from aserve.gpu.device.cpu.linear import linear_per_expert
from aserve.gpu.executor import TorchExecutor
from aserve.gpu.kv.pools import KvPools
from aserve.gpu.layers.grouped_linear import PrepareGrouped
from aserve.gpu.layers.linear import Prepare
from aserve.gpu.models.base import CausalModel, HiddenCapture
from aserve.gpu.sampling.params import RowTables
from aserve.gpu.step.forward_batch import ForwardBatch, ForwardOverrides
from aserve.gpu.step.future_map import FutureMap
from aserve.gpu.step.resolve import DeviceState
from aserve.gpu.weights.source import Target
from aserve_kernels.cpu.decoder_forward import StepOutputs, StepRows, decoder_step
from aserve_kernels.cpu.host_rows import Int64s
from tests.gpu.batch_builder import Spans, running, tokens_by_row
from tests.gpu.device_tables import CPU, device_batch, make_pools
from tests.load_model import load_model
from tests.parity.conftest import ReferenceOf
from tests.parity.references import MAX_MODEL_LEN
from tests.parity.test_forms import rounded

KINDS = (
    *("llama-biased", "llama-longrope", "qwen3-mixed", "gemma2", "gemma3", "granite"),
    "granite-hybrid-attention",  # without positions
    *("smollm3", "exaone4-sliding"),  # without positions in some layers
    *("olmo2", "olmo3-yarn"),  # norms of all heads together
    "ministral3",  # queries that positions scale
    *("ernie4.5", "glm4"),  # pairs of neighbouring elements
)
EXPERT_KINDS = (
    "ernie4.5-moe",
    "minimax-m2",
    "mixtral",
    "olmoe",
    "qwen2-moe",
    "qwen3-moe",
    "glm4-moe",
    "glm4-moe-groups",
    "gpt-oss",
    "solar-open",
)
# Attention is the last layer of one.
RECURRENT_KINDS = (
    *("qwen3.5", "qwen3.5-interval", "qwen3.5-moe", "qwen3-next-dense"),
    *("lfm2", "lfm2-indexed", "lfm2-moe"),
    *("granite-hybrid", "granite-hybrid-dense", "granite-hybrid-rope"),
    *("nemotron-h", "nemotron-h-dense"),
    *("falcon-h1", "falcon-h1-norm", "falcon-h1-late-norm"),
)
# The rules of every fast form, relative in norm.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
PAGE_SIZE, MAX_ROWS = 4, 4
COLUMNS = -(-MAX_MODEL_LEN // PAGE_SIZE)


@dataclass
class Site:
    model: CausalModel
    state: DeviceState

    @property
    def pools(self) -> KvPools:
        return self.state.pools

    def plain(self, batch: ForwardBatch) -> Tensor:
        attention = TorchReference(self.pools)
        attend = attention.bind(batch, attention.plan(batch))
        return self.model.forward(
            batch.input_ids, batch.rope_positions, attend, capture=batch.capture
        )

    def compiled(self) -> CompiledForward:
        made = make_compiled_forward(self.model, self.state)
        assert made is not None
        return made

    def parts(self) -> list[Tensor]:
        return [part for kv in self.pools.layers.values() for part in (kv.keys, kv.values)]


def load_tiled(
    directory: Path,
    dtype: torch.dtype,
    num_threads: int = 1,
    prepare: Prepare = prepare_tiled,
    prepare_grouped: PrepareGrouped = linear_per_expert,
) -> CausalModel:
    """In bfloat16, so many threads share each step."""
    torch.set_num_threads(num_threads)
    name = str(dtype).removeprefix("torch.")
    ops = CpuDevice().ops(dtype, is_deterministic=False)
    target = Target(prepare=prepare, prepare_grouped=prepare_grouped, elementwise=ops.elementwise)
    return load_model(directory, dtype=name, max_model_len=MAX_MODEL_LEN, target=target)


def site(
    directory: Path,
    dtype: torch.dtype,
    prepare: Prepare = prepare_tiled,
    kv_dtype: torch.dtype | None = None,
    prepare_grouped: PrepareGrouped = linear_per_expert,
) -> Site:
    """Pages of the rows lie scattered, and hold what an earlier step might have left there. KV has
    the model's dtype unless another one is given."""
    model = load_tiled(directory, dtype, prepare=prepare, prepare_grouped=prepare_grouped)
    num_pages = 1 + MAX_ROWS * COLUMNS
    shape = (MAX_ROWS + 1, COLUMNS)
    pools = make_pools(
        model.layers, num_pages, table_shape=shape, page_size=PAGE_SIZE, dtype=kv_dtype or dtype
    )
    generator = torch.Generator().manual_seed(1)
    for table in pools.page_tables:
        pages = 1 + torch.randperm(num_pages - 1, generator=generator)
        table[1:] = pages.view(MAX_ROWS, COLUMNS)
    for kv in pools.layers.values():
        for part in (kv.keys, kv.values):
            part.copy_(torch.randn(part.shape, generator=generator).bfloat16())
    tables = RowTables(max_rows=MAX_ROWS, device=CPU)
    return Site(model, DeviceState(pools, tables, FutureMap((), max_rows=MAX_ROWS, device=CPU)))


def distance(got: Tensor, expected: Tensor) -> float:
    return float((got.float() - expected.float()).norm() / expected.float().norm())


def streams_of(capture: HiddenCapture, hidden: Tensor) -> tuple[Tensor, ...]:
    assert capture.before_norm is not None
    return (*capture.layers, capture.before_norm, hidden)


@pytest.mark.slow
@torch.inference_mode()
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_one_call_gives_the_hidden_states_and_kv_of_many(
    kind: str, dtype: torch.dtype, reference_of: ReferenceOf, tmp_path: Path
) -> None:
    """Prompts, chunks behind a prefix and decoding rows, shorter and longer than the windows. A
    drafter may read the residual streams."""
    directory = rounded(reference_of(kind), dtype, tmp_path)
    exact, here = site(directory, torch.float32), site(directory, dtype)
    fused_step = here.compiled()
    for query_lens, lens in (([1, 1, 1], [0, 30, 70]), ([19, 1, 3, 33], [0, 41, 25, 30])):
        batch = ForwardBatch.init_new(device_batch(query_lens, lens), here.pools)
        before = [part.clone() for part in here.parts()]
        wanted, found = (HiddenCapture((0, 1), wants_before_norm=True) for _ in range(2))
        expected = exact.plain(batch.overridden(ForwardOverrides(capture=wanted)))
        got = fused_step.run(batch.overridden(ForwardOverrides(capture=found)))
        streams = zip(streams_of(found, got), streams_of(wanted, expected), strict=True)
        for stream, its_stream in streams:
            assert stream.dtype == dtype
            assert distance(stream, its_stream) < TOLERANCES[dtype]
        for part, its_kv, old in zip(here.parts(), exact.parts(), before, strict=True):
            assert distance(part, its_kv) < TOLERANCES[dtype]
            is_kept = (its_kv == old.float()).all(dim=(1, 2))
            assert torch.equal(part[is_kept], old[is_kept])


@pytest.mark.slow
@torch.inference_mode()
def test_kv_of_fp8_is_stored_and_read_in_one_call(reference_of: ReferenceOf) -> None:
    """What one rounds up the other may round down, if it is near the middle of two elements."""
    directory, fp8 = reference_of("gemma2").directory, torch.float8_e4m3fn
    here, plain = (site(directory, torch.float32, kv_dtype=fp8) for _ in range(2))
    for own in (here, plain):
        for index, kv in own.pools.layers.items():
            own.pools.layers[index] = replace(kv, scales=(0.5, 0.25))
    fused_step = here.compiled()
    for query_lens, lens in (([1, 1, 1], [0, 30, 70]), ([19, 1, 3, 33], [0, 41, 25, 30])):
        batch = ForwardBatch.init_new(device_batch(query_lens, lens), here.pools)
        assert distance(fused_step.run(batch), plain.plain(batch)) < 0.02
        for part, its_kv in zip(here.parts(), plain.parts(), strict=True):
            assert distance(part, its_kv) < 0.01


@pytest.mark.slow
@torch.inference_mode()
def test_weights_and_kv_of_bfloat16_are_widened_in_one_call(reference_of: ReferenceOf) -> None:
    """As large models have them where the processor has no instructions for bfloat16."""
    directory = reference_of("gemma2").directory
    here, plain = (
        site(directory, torch.float32, prepare_bf16_stored, kv_dtype=torch.bfloat16)
        for _ in range(2)
    )
    fused_step = here.compiled()
    for query_lens, lens in (([1, 1, 1], [0, 30, 70]), ([19, 1, 3, 33], [0, 41, 25, 30])):
        batch = ForwardBatch.init_new(device_batch(query_lens, lens), here.pools)
        assert distance(fused_step.run(batch), plain.plain(batch)) < 1e-3
        for part, its_kv in zip(here.parts(), plain.parts(), strict=True):
            assert distance(part, its_kv) < 1e-3


@pytest.mark.slow
@torch.inference_mode()
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("bits", [8, 4])
def test_weights_of_few_bits_are_multiplied_in_one_call(
    bits: int, dtype: torch.dtype, reference_of: ReferenceOf
) -> None:
    """Some layers of a checkpoint may have more bits than others. An input that differs in the last
    bit of bfloat16 may become another integer of 8 bits."""
    tolerance = 1e-1 if dtype == torch.bfloat16 else TOLERANCES[dtype]
    coded = prepare_quantized(bits)
    for prepare in (
        coded,
        lambda linear, *own, **named: (prepare_tiled if linear.weight.shape[0] > 64 else coded)(
            linear, *own, **named
        ),
    ):
        here = site(reference_of("llama-biased").directory, dtype, prepare)
        for query_lens, lens in (([1, 1], [30, 70]), ([19, 1, 3], [0, 41, 25])):
            batch = ForwardBatch.init_new(device_batch(query_lens, lens), here.pools)
            fused_step = here.compiled()
            assert distance(fused_step.run(batch), here.plain(batch)) < tolerance


@pytest.mark.slow
def test_what_it_cannot_do_is_left_to_the_model(reference_of: ReferenceOf) -> None:
    here = site(reference_of("llama-tied").directory, torch.float32)
    fused_step = here.compiled()

    made = device_batch([9], [0])
    plain = ForwardBatch.init_new(made, here.pools)
    in_tree = ForwardOverrides(tree_mask=torch.ones(9, 9, dtype=torch.bool))
    assert fused_step.can_run(plain)
    assert not fused_step.can_run(ForwardBatch.init_new(made, here.pools, in_tree))
    assert not fused_step.can_run(replace(plain, query_lens_cpu=np.array([1, FEW_TOKENS + 1])))
    assert fused_step.can_run(replace(plain, query_lens_cpu=np.array([FEW_TOKENS] * 3)))
    latent = site(reference_of("deepseek3").directory, torch.float32)
    assert make_compiled_forward(latent.model, latent.state) is None


def executor_of(
    directory: Path,
    attention: str,
    dtype: torch.dtype = torch.float32,
    num_threads: int = 1,
) -> TorchExecutor:
    options = BuildOptions(directory, num_pages=80, max_rows=4, page_size=4, attention=attention)
    model = load_tiled(directory, dtype, num_threads)
    return assemble(model, Autoregressive(), CpuDevice(), options)


STEPS: list[tuple[Spans, list[int]]] = [
    ({1: range(5, 30)}, []),
    ({1: range(30, 37), 2: [4]}, [1, 2]),
    ({1: [-1], 2: [-2], 3: [9, 8]}, [1, 2, 3]),
    *[({3: [-3], 1: [-1], 2: [-2]}, [3, 1, 2])] * 24,
    ({4: range(40, 60), 2: [-2], 1: [-1]}, [4, 2]),
    *[({2: [-2], 4: [-4]}, [2, 4])] * 8,
]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(
    "kind", ["qwen3-mixed", "gemma2", "granite", *EXPERT_KINDS, *RECURRENT_KINDS]
)
async def test_a_step_in_one_call_draws_the_tokens_of_its_parts(
    kind: str, temperature: float, reference_of: ReferenceOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are launched before the results of those before are known."""
    step = Mock(side_effect=CompiledForward.step)
    monkeypatch.setattr(CompiledForward, "step", lambda *given: step(*given))
    directory = reference_of(kind).directory
    async with (
        running(executor_of(directory, "auto"), temperature=temperature) as short,
        running(executor_of(directory, "torch-ref"), temperature=temperature) as plain,
    ):
        tickets = [
            [run.launch(query_lens, sampling=sampling) for run in (short, plain)]
            for query_lens, sampling in STEPS
        ]
        for pair in tickets:
            found, expected = [tokens_by_row(await ticket) for ticket in pair]
            assert found == expected
    assert step.call_count == len(STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("kind", ["qwen3-mixed", "qwen2-moe", *RECURRENT_KINDS])
async def test_tokens_that_nobody_reads_are_left_out_of_the_last_layer(
    kind: str,
    dtype: torch.dtype,
    reference_of: ReferenceOf,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory = rounded(reference_of(kind), dtype, tmp_path)
    num_outputs: list[int] = []

    async def tokens_of(keeps_hidden: bool) -> list[object]:
        def step(ids: Int64s, lens: Int64s, rows: StepRows, *given: Any, **how: Any) -> StepOutputs:
            if keeps_hidden:
                rows = replace(rows, num_read=rows.query_lens)
            num_outputs.append(int(rows.num_read.sum()))
            return decoder_step(ids, lens, rows, *given, **how)

        monkeypatch.setattr(fused_decoder, "decoder_step", step)
        async with running(executor_of(directory, "auto", dtype), temperature=0.9) as run:
            tickets = [run.launch(lens, sampling=sampling) for lens, sampling in STEPS]
            return [tokens_by_row(await ticket) for ticket in tickets]

    assert await tokens_of(keeps_hidden=False) == await tokens_of(keeps_hidden=True)
    num_read = [len(sampling) for _, sampling in STEPS]
    num_tokens = [sum(map(len, spans.values())) for spans, _ in STEPS]
    assert num_outputs == [*num_read, *num_tokens]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["qwen3-mixed", "gemma2", "granite", *EXPERT_KINDS, *RECURRENT_KINDS]
)
async def test_a_team_of_threads_changes_no_bit(
    kind: str, reference_of: ReferenceOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Mock(side_effect=decoder_step)
    monkeypatch.setattr(fused_decoder, "decoder_step", step)
    monkeypatch.setattr(team_choice, "FIRST", 1 << 20)  # no step is left to fewer threads
    dtype, num_threads = torch.bfloat16, torch.get_num_threads()
    directory = rounded(reference_of(kind), dtype, tmp_path)
    try:
        team, alone = (executor_of(directory, "auto", dtype, num) for num in (2, 1))
    finally:
        torch.set_num_threads(num_threads)
    async with running(team, temperature=0.9) as shared, running(alone, temperature=0.9) as plain:
        for query_lens, sampling in STEPS:
            tickets = [run.launch(query_lens, sampling=sampling) for run in (shared, plain)]
            found, expected = [tokens_by_row(await ticket) for ticket in tickets]
            assert found == expected
    sizes = [call.kwargs["num_workers"] for call in step.call_args_list]
    assert sorted(sizes) == [1] * len(STEPS) + [2] * len(STEPS)
