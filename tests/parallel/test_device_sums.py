"""Tensor-parallel ranks that sum as ranks on devices do: their tokens are those of one rank.

The CPU is the device here, gloo stands for NCCL, and each rank is a thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest
import torch
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.distributed_c10d import GroupName

from aserve.gpu.build import BuildOptions, build_executor
from aserve.gpu.executor import TorchExecutor
from aserve.gpu.models.decoder import Decoder
from aserve.gpu.parallel.all_reduce import (
    BUFFER_BYTES,
    GatheredSum,
    SymmetricSum,
    symmetric_sums,
)
from aserve.gpu.parallel.collectives import GroupCollectives, gloo_group
from aserve.gpu.parallel.device_collectives import DeviceCollectives, DeviceGroup
from aserve.gpu.parallel.fused_norm import RankAddNorm, sum_norm_ref
from aserve.gpu.parallel.nccl import register_group, sums_right
from aserve.parallel.leader import ParallelExecutor
from aserve.parallel.topology import Coordinates, Patience
from aserve.tiny import MODEL_DIR
from tests.gpu.drive import serve
from tests.parallel.test_rank_traces import RankThread
from tests.parallel.test_ranks import asks, loaded

NUM_RANKS = 2
CPU = torch.device("cpu")


def joined(place: Coordinates, patience: Patience) -> DeviceCollectives:
    group = cast(DeviceGroup, gloo_group(place, name="device"))
    return DeviceCollectives(GroupCollectives(place, patience), group)


def by_group(ranks: DeviceCollectives) -> DeviceCollectives:
    return ranks


def gathered(ranks: DeviceCollectives) -> DeviceCollectives:
    return DeviceCollectives(ranks.host, ranks.group, [GatheredSum(ranks.gather)])


def fused(ranks: DeviceCollectives) -> DeviceCollectives:
    ranks.make_fused = lambda _size, _dtype: functools.partial(sum_norm_ref, ranks)
    return ranks


def num_fused(executor: TorchExecutor) -> int:
    model = executor._runner.model
    assert isinstance(model, Decoder)
    return sum(
        isinstance(b.before_mlp, RankAddNorm) and b.before_mlp.fused is not None
        for b in model.blocks
    )


@pytest.mark.slow
@pytest.mark.parametrize("sums_by", [by_group, gathered, fused])
def test_tokens_are_those_of_one_rank_however_the_sums_are_made(
    sums_by: Callable[[DeviceCollectives], DeviceCollectives], tmp_path: Path
) -> None:
    one = serve(loaded(), asks())
    patience = Patience()
    places = [Coordinates(rank, NUM_RANKS, store=str(tmp_path / "store")) for rank in range(2)]

    def load(place: Coordinates) -> TorchExecutor:
        options = BuildOptions(
            MODEL_DIR,
            dtype="float64",
            num_pages=60,
            max_rows=4,
            attention="torch-ref",
            ranks=sums_by(joined(place, patience)),
            num_processes=NUM_RANKS,
        )
        return build_executor(options)

    with ThreadPoolExecutor(NUM_RANKS) as pool:
        own, other = pool.map(load, places)
    assert (num_fused(own) > 0) == (sums_by is fused)
    engine = ParallelExecutor(own, [RankThread(places[1], other, patience)], patience)
    assert serve(engine, asks(), chaos=3).outputs == one.outputs


def test_sums_go_the_first_way_that_takes_them_by_size_and_dtype() -> None:
    buffer = torch.zeros(BUFFER_BYTES, dtype=torch.uint8)

    def way_of(num_ranks: int, num_elements: int, dtype: torch.dtype = torch.bfloat16) -> str:
        ways = symmetric_sums(buffer, "of no group", num_ranks)
        x = torch.empty(num_elements, dtype=dtype)
        return next((way.name for way in ways if way.takes(x)), "the group")

    assert way_of(2, 8) == "one-shot"
    assert way_of(2, BUFFER_BYTES // 2) == "one-shot"
    assert way_of(2, BUFFER_BYTES // 2 + 8) == "the group"
    assert [way_of(4, n) for n in (1 << 18, (1 << 18) + 8)] == ["one-shot", "two-shot"]
    assert [way_of(8, n) for n in (1 << 17, (1 << 17) + 8)] == ["one-shot", "two-shot"]
    assert [way_of(3, n) for n in (1 << 18, (1 << 18) + 8)] == ["one-shot", "the group"]
    assert way_of(16, 8) == "the group"
    assert way_of(2, 4) == "the group"  # not a multiple of 16 bytes
    assert way_of(2, 8, torch.float16) == "the group"
    assert way_of(2, 8, torch.float64) == "the group"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 8), (5, 16), (0, 4), (2, 1000), (3,)])
def test_every_way_has_the_sum_of_the_reference(
    shape: tuple[int, ...], dtype: torch.dtype, tmp_path: Path
) -> None:
    """Symmetric memory is a stand-in: a buffer whose kernel sums by the group."""

    def run(rank: int) -> list[torch.Tensor]:
        ranks = joined(Coordinates(rank, NUM_RANKS, store=str(tmp_path / "store")), Patience(10.0))
        x = torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)

        def through(own: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return ranks.group_sum(own.copy_(x))

        buffer = torch.zeros(BUFFER_BYTES, dtype=torch.uint8)
        symmetric = SymmetricSum("stand-in", through, buffer, BUFFER_BYTES)
        found = [gathered(ranks).sum(x.clone()), ranks.sum(x.clone())]
        found.append(DeviceCollectives(ranks.host, ranks.group, [symmetric]).sum(x.clone()))
        assert sums_right(ranks.sum, ranks, CPU)
        assert not sums_right(lambda own: own, ranks, CPU)
        assert ranks.least(3 - rank) == 2
        assert torch.equal(ranks.concat(x), torch.cat([*ranks.gather(x)], dim=-1))
        return found

    with ThreadPoolExecutor(NUM_RANKS) as pool:
        [first, second] = pool.map(run, range(NUM_RANKS))
    assert all(torch.equal(each, first[0]) for each in (*first, *second))


def test_the_schemas_of_torchs_kernels_are_those_that_are_called() -> None:
    ops = torch.ops.symm_mem
    one_shot = ops.one_shot_all_reduce_copy.default._schema
    two_shot = ops.two_shot_all_reduce_out.default._schema
    assert [each.name for each in one_shot.arguments] == [
        *("symm_buffer", "local_input", "reduce_op", "group_name")
    ]
    assert [each.name for each in two_shot.arguments] == [
        *("input", "reduce_op", "group_name", "output")
    ]


def test_a_group_is_known_to_torch_by_its_name(tmp_path: Path) -> None:
    """torch's symmetric memory finds the ranks and their store by it."""
    place = Coordinates(0, 1, store=str(tmp_path / "store"))
    group = cast(DeviceGroup, gloo_group(place, name="device"))
    name = GroupName(f"symmetric-{place.store}")
    known = register_group(place, group, CPU, name)
    found = _resolve_process_group(name)
    assert (found.rank(), found.size(), found.group_name) == (0, 1, known.group_name)
    assert known.group_name == name
