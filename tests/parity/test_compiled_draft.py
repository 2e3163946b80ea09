"""The compiled forwards of draft models against their torch form: outputs, KV, and drawn tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from aserve.gpu.build import BuildOptions, build_executor
from aserve.gpu.device.cpu.fused_draft import CompiledDraft, make_compiled_draft
from aserve.gpu.device.cpu.isa import has_tiles, read_isa
from aserve.gpu.device.fused_step import FusedRows
from aserve.gpu.models.draft_decoder import DraftDecoder, JoinedInputs
from aserve.gpu.runner import ModelRunner
from aserve.gpu.sampling.draw import add_noise
from aserve.gpu.sampling.gumbel import gumbel_noise
from aserve.gpu.spec.dflash import BlockModel
from aserve.gpu.spec.eagle import Eagle1Model
from aserve.gpu.spec.eagle3 import Eagle3Model
from aserve.gpu.spec.frozen_kv import AssistantModel
from aserve.gpu.spec.nextn_model import Modules
from aserve.gpu.spec.request import SpecOptions
from aserve.gpu.step.forward_batch import ForwardBatch
from aserve.tiny import DRAFTERS_DIR, MODEL_DIR
from aserve_kernels.row_columns import FLOAT_COLUMNS, INT_COLUMNS
from tests.gpu.device_tables import device_batch
from tests.parity.test_compiled_forward import TOLERANCES, distance

MODELS = (Eagle1Model, Eagle3Model, Modules, AssistantModel, BlockModel)
# Those that this machine multiplies in tiles.
DTYPES = [dtype for dtype in TOLERANCES if has_tiles(dtype, read_isa())]
PAGE_SIZE, COLUMNS = 4, 12
SHAPES = (([1, 1, 1], [0, 30, 41]), ([9, 1, 3], [0, 35, 25]))  # query lengths, lengths before them


def joins(**changes: Any) -> Callable[[DraftDecoder], DraftDecoder]:
    """Returns what changes how a model joins its inputs: published checkpoints differ in that."""

    def change(decoder: DraftDecoder) -> DraftDecoder:
        return replace(decoder, inputs=replace(decoder.inputs or JoinedInputs(), **changes))

    return change


def same(decoder: DraftDecoder) -> DraftDecoder:
    return decoder


CASES = [
    ("EAGLE", same),
    ("EAGLE", joins(is_hidden_first=True)),
    ("EAGLE3", same),
    ("EAGLE3", joins(keeps_normed=True)),
    ("NEXTN", same),
    ("NEXTN", joins(is_hidden_first=False)),
    ("FROZEN_KV_MTP", same),
    ("DFLASH", same),
]


def built(algorithm: str, dtype: str) -> ModelRunner:
    """Pages of the rows lie scattered, and hold what an earlier step might have left there."""
    speculative = SpecOptions(algorithm, bundled_drafters=DRAFTERS_DIR)
    options = BuildOptions(
        MODEL_DIR, dtype=dtype, num_pages=60, page_size=PAGE_SIZE, max_rows=3, max_model_len=48,
        speculative=speculative,
    )  # fmt: skip
    runner = build_executor(options)._runner
    generator = torch.Generator().manual_seed(1)
    pools = runner.state.pools
    pages = 1 + torch.randperm(3 * COLUMNS, generator=generator).view(3, COLUMNS)
    pools.page_tables[0][1:4, :COLUMNS] = pages
    for part in kv_of(runner):
        part.copy_(torch.randn(part.shape, generator=generator))
    return runner


def kv_of(runner: ModelRunner) -> list[Tensor]:
    assert runner.state.draft_pools is not None
    pools = (runner.state.pools, runner.state.draft_pools)
    return [part for each in pools for kv in each.layers.values() for part in (kv.keys, kv.values)]


def decoder_of(runner: ModelRunner) -> DraftDecoder:
    drafter = runner.drafter
    assert isinstance(drafter, MODELS)
    return drafter.decoder


def compiled(runner: ModelRunner, decoder: DraftDecoder) -> CompiledDraft:
    made = make_compiled_draft(decoder, runner.state)
    assert made is not None
    return made


@pytest.mark.slow
@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("algorithm", "change"), CASES)
def test_one_call_computes_what_the_operators_of_a_draft_model_do(
    algorithm: str, change: Callable[[DraftDecoder], DraftDecoder], dtype: torch.dtype
) -> None:
    runner = built(algorithm, str(dtype).removeprefix("torch."))
    decoder = change(decoder_of(runner))
    made = compiled(runner, decoder)
    before = [part.clone() for part in kv_of(runner)]
    for query_lens, lens in SHAPES:
        if algorithm == "FROZEN_KV_MTP":
            query_lens, lens = [1, 1, 1], [each + 1 for each in lens]
        own = device_batch(query_lens, lens, first_id=10 * lens[2])
        batch = ForwardBatch.init_new(own, runner.state.pools)
        hidden = None
        if decoder.inputs is not None:
            size = decoder.embeddings.shape[1]
            hidden = torch.randn(batch.num_tokens, size, dtype=dtype)
        attend = runner.draft_attention(batch)
        expected = decoder.forward(batch.input_ids, batch.rope_positions, attend, hidden=hidden)
        its_kv = [part.clone() for part in kv_of(runner)]
        for part, old in zip(kv_of(runner), before, strict=True):
            part.copy_(old)
        rows = FusedRows(batch.rows.numpy(), batch.lens.numpy(), batch.query_lens.numpy())
        got = made.forward(batch.input_ids.numpy(), rows, hidden)
        assert got.dtype == dtype
        assert distance(got, expected) < TOLERANCES[dtype]
        for part, theirs, old in zip(kv_of(runner), its_kv, before, strict=True):
            assert distance(part, theirs) < TOLERANCES[dtype]
            is_kept = (theirs == old).all(dim=(1, 2))
            assert torch.equal(part[is_kept], old[is_kept])
        for part, theirs in zip(kv_of(runner), its_kv, strict=True):
            part.copy_(theirs)
        before = its_kv


@torch.inference_mode()
@pytest.mark.parametrize("algorithm", ["EAGLE3", "NEXTN"])  # EAGLE3 has a reduced vocabulary
def test_drafts_are_drawn_with_the_noise_of_the_targets_token_ids(algorithm: str) -> None:
    runner = built(algorithm, "float32")
    decoder = decoder_of(runner)
    tables = runner.state.tables
    seeds, temperatures = torch.tensor([0, 5, 6, 1 << 40]), torch.tensor([0.0, 0.0, 0.8, 1.5])
    tables.int_table[:, INT_COLUMNS.index("seed")] = seeds
    tables.float_table[:, FLOAT_COLUMNS.index("temperature")] = temperatures
    rows, positions = torch.tensor([1, 2, 3] * 30), torch.arange(90)
    hidden = torch.randn(90, 128)
    logits = decoder.logits(hidden)
    ids = decoder.token_ids
    ids = torch.arange(logits.shape[1]) if ids is None else ids
    noise = gumbel_noise(seeds[rows], positions, ids, torch.float32)
    expected = ids[add_noise(logits, noise, temperatures[rows])[1].argmax(dim=1)]
    drawn = compiled(runner, decoder).draw(
        hidden, rows.numpy(), positions.numpy(), positions.numpy() - 1
    )
    assert drawn.tolist() == expected.tolist()
    assert len(np.unique(drawn)) > 10


def test_models_that_the_kernels_do_not_know_are_left_to_torch() -> None:
    runner = built("EAGLE3", "float32")
    decoder = decoder_of(runner)
    assert make_compiled_draft(decoder, replace(runner.state, draft_pools=None)) is None

    def in_torch(x: Tensor) -> Tensor:
        return x

    projected = replace(decoder, inputs=JoinedInputs(projection=in_torch))
    for other in (projected, replace(decoder, head=in_torch)):
        assert make_compiled_draft(other, runner.state) is None
