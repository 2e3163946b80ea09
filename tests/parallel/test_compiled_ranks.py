"""Compiled forwards of ranks and stages, each a thread: hidden states are those of one device. A
rank that is lost ends the forward of the others."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor

from aserve.gpu.device.cpu.device import CpuDevice
from aserve.gpu.device.cpu.fused_decoder import CompiledForward, make_compiled_forward
from aserve.gpu.device.cpu.kernel_linear import prepare_tiled
from aserve.gpu.kv.pools import KvPools
from aserve.gpu.models.base import CausalModel, HiddenCapture, LoadPlan
from aserve.gpu.models.load import make_loader
from aserve.gpu.models.recurrent import StateShape, recurrent_layers_of
from aserve.gpu.parallel import shared
from aserve.gpu.parallel.pipe import Pipe
from aserve.gpu.parallel.shared import SharedCollectives
from aserve.gpu.parallel.source import for_rank
from aserve.gpu.parallel.stages import Pipeline, StagedDecoder
from aserve.gpu.sampling.params import RowTables
from aserve.gpu.step.forward_batch import ForwardBatch, ForwardOverrides
from aserve.gpu.step.future_map import FutureMap
from aserve.gpu.step.resolve import DeviceState
from aserve.gpu.weights.source import ONE_STAGE, Stage, Target
from aserve.parallel.topology import Coordinates, Patience, RankLost
from aserve.tiny import MODEL_DIR
from aserve_kernels.cpu import rank_sum
from aserve_kernels.cpu.team import Team, new_meeting
from aserve_kernels.delta_rule import DeltaStates
from tests.gpu.device_tables import CPU, device_batch, make_pools
from tests.parity.references import make_reference

T = TypeVar("T")

NUM_RANKS, MAX_ROWS, COLUMNS, PAGE_SIZE = 2, 4, 16, 4
SPANS = [([5, 3], [0, 0]), ([1, 4], [5, 3]), ([1, 1], [6, 7])]  # prompts, a chunk, decodes
CAPTURED = (0, 2, 4)  # layers
SMALL_BUFFER = 1 << 11  # two tokens, so that sums travel in several pieces


def on_ranks(run: Callable[[int], T]) -> list[T]:
    with ThreadPoolExecutor(NUM_RANKS) as pool:
        return list(pool.map(run, range(NUM_RANKS)))


def connected(store: Path, patience: Patience) -> list[SharedCollectives]:
    places = [Coordinates(rank, NUM_RANKS, store=str(store)) for rank in range(NUM_RANKS)]
    return on_ranks(lambda rank: SharedCollectives(places[rank], patience))


def model_of(
    stage: Stage = ONE_STAGE,
    ranks: SharedCollectives | None = None,
    *,
    folder: Path = MODEL_DIR,
) -> CausalModel:
    torch.set_num_threads(1)
    ops = CpuDevice().ops(torch.float32, is_deterministic=False)
    target = Target(prepare=prepare_tiled, elementwise=ops.elementwise, stage=stage)
    if ranks is not None:
        target = for_rank(target, ranks, beside={})
    return make_loader(folder)[0].load(LoadPlan(torch.float32, 64, False, target))


def compiled(model: CausalModel) -> tuple[CompiledForward, KvPools]:
    num_pages = 1 + MAX_ROWS * COLUMNS
    shape = (MAX_ROWS + 1, COLUMNS)
    pools = make_pools(
        model.layers, num_pages, table_shape=shape, page_size=PAGE_SIZE, dtype=torch.float32
    )
    for table in pools.page_tables:
        table[1:] = 1 + torch.arange(num_pages - 1).view(MAX_ROWS, COLUMNS)
    relay = FutureMap((), max_rows=MAX_ROWS, device=CPU)
    states = {layer.index: states_of(layer.shape) for layer in recurrent_layers_of(model)}
    tables = RowTables(max_rows=MAX_ROWS, device=CPU)
    state = DeviceState(pools, tables, relay, recurrent=states)
    made = make_compiled_forward(model, state)
    assert made is not None
    return made, pools


def states_of(shape: StateShape) -> DeltaStates:
    rows = MAX_ROWS + 1
    inputs = torch.zeros(rows, shape.num_taps, shape.num_channels)
    return DeltaStates(torch.zeros(rows, 1, *shape.matrix_sizes), inputs)


def outputs_of(model: CausalModel) -> list[Tensor]:
    """The hidden states of each forward."""
    return run_all(*compiled(model))


def run_all(
    forward: CompiledForward, pools: KvPools, captures: list[HiddenCapture] | None = None
) -> list[Tensor]:
    """With `captures`, what each forward captured is added there."""
    with torch.inference_mode():
        batches = [ForwardBatch.init_new(device_batch(*spans), pools) for spans in SPANS]
        if captures is not None:
            captures += [HiddenCapture(CAPTURED, wants_before_norm=True) for _ in batches]
            each = zip(batches, captures, strict=True)
            batches = [batch.overridden(ForwardOverrides(capture=made)) for batch, made in each]
        return [forward.run(batch) for batch in batches]


@pytest.mark.parametrize(
    "kind", ["", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("qwen3.5", "lfm2"))]
)
def test_all_ranks_have_the_same_bits_which_are_near_those_of_one(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_reference(kind, tmp_path / kind).directory if kind else MODEL_DIR
    monkeypatch.setattr(shared, "BUFFER_BYTES", SMALL_BUFFER)
    ranks = connected(tmp_path / "store", Patience(5.0))
    models = [
        model_of(ranks=each, folder=folder) for each in ranks
    ]  # which the records of forwards point to
    forwards = [compiled(model) for model in models]
    found = on_ranks(lambda rank: run_all(*forwards[rank]))
    for one, *parts in zip(outputs_of(model_of(folder=folder)), *found, strict=True):
        assert torch.equal(*parts)
        assert torch.allclose(parts[0], one, rtol=1e-4, atol=1e-4)


def test_a_compiled_stage_changes_no_bit() -> None:
    after, before = socket.socketpair()
    stages: list[StagedDecoder] = []
    for number, pipe in enumerate((Pipe(None, after), Pipe(before, None))):
        stage = Pipeline(Stage(number, 2), pipe).part_of(model_of(Stage(number, 2)))
        assert isinstance(stage, StagedDecoder)
        stage.captured, stage.captures = CAPTURED, True  # layers of both stages
        stages.append(stage)
    # Kernels are compiled by one thread at a time, as in the processes of an engine.
    forwards = [compiled(stage) for stage in stages]
    own: list[HiddenCapture] = []
    alone: list[HiddenCapture] = []
    ran = on_ranks(lambda number: run_all(*forwards[number], own if number else None))
    whole = model_of()  # which the records of its forward point to
    for one, last in zip(run_all(*compiled(whole), alone), ran[1], strict=True):
        assert torch.equal(last, one)
    for one_capture, capture in zip(alone, own, strict=True):
        assert len(capture.layers) == len(CAPTURED)
        assert all(map(torch.equal, capture.layers, one_capture.layers))
        assert capture.before_norm is not None
        assert one_capture.before_norm is not None
        assert torch.equal(capture.before_norm, one_capture.before_norm)


def test_sums_in_the_kernel_and_in_torch_may_follow_each_other(tmp_path: Path) -> None:
    ranks = connected(tmp_path / "store", Patience())

    def run(rank: int) -> set[float]:
        found = set()
        ranks[rank].begin()  # tells the kernel for how long it waits
        for number in range(300):
            values = np.full(300, number * (rank + 1), np.float32)
            rank_sum.sum_over_ranks(ranks[rank].address, values, Team(0, 1, new_meeting()))
            summed = ranks[rank].sum(torch.full((300,), float(number * (rank + 1))))
            found |= {*(values - 3 * number).tolist(), *(summed - 3 * number).tolist()}
        return found

    assert on_ranks(run) == [{0.0}] * NUM_RANKS


@pytest.mark.parametrize("has_ended", [True, False])
def test_a_lost_rank_ends_the_forward(has_ended: bool, tmp_path: Path) -> None:
    patience = Patience()
    ranks = connected(tmp_path / "store", patience)
    model = model_of(ranks=ranks[0])
    forward, pools = compiled(model)
    patience.seconds = 600.0 if has_ended else 0.1
    if has_ended:
        del ranks[1]
    with torch.inference_mode():
        batch = ForwardBatch.init_new(device_batch(*SPANS[0]), pools)
        with pytest.raises(RankLost, match="has ended" if has_ended else "did not come"):
            forward.run(batch)
