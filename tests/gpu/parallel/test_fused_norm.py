"""Sums over ranks that are fused with the norm behind them, against the plain operators. Ranks are
threads that sum by gloo, and a stand-in has the arguments and results of FlashInfer's function."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from aserve.gpu.layers.ops import PLAIN
from aserve.gpu.parallel import flashinfer_sums
from aserve.gpu.parallel.collectives import GroupCollectives
from aserve.gpu.parallel.flashinfer_sums import MAX_TOKENS, flashinfer_sum_norm
from aserve.gpu.parallel.fused_norm import RankAddNorm, sum_norm_ref, with_fusable_norms
from aserve.gpu.parallel.host_comm import HostComm
from aserve.parallel.topology import Coordinates, Patience

T = TypeVar("T")
NUM_RANKS = 2
HIDDEN = 24
EPS = 1e-6
CPU = torch.device("cpu")


def on_ranks(store: Path, run: Callable[[GroupCollectives], T]) -> list[T]:
    def run_rank(rank: int) -> T:
        return run(GroupCollectives(Coordinates(rank, NUM_RANKS, store=str(store)), Patience(10.0)))

    with ThreadPoolExecutor(NUM_RANKS) as pool:
        return list(pool.map(run_rank, range(NUM_RANKS)))


def fake_flashinfer(factor: float = 1.0) -> Any:
    """flashinfer.comm. With another factor than 1 its sums are wrong."""

    def make_workspace(
        *,
        backend: str,
        world_size: int,
        rank: int,
        max_token_num: int,
        hidden_dim: int,
        dtype: torch.dtype,
        comm_backend: HostComm,
    ) -> HostComm:
        assert backend == "trtllm"
        assert (comm_backend.Get_rank(), comm_backend.Get_size()) == (rank, world_size)
        assert max_token_num >= MAX_TOKENS
        return comm_backend

    def fused(
        *,
        input: Tensor,  # FlashInfer's name
        workspace: HostComm,
        pattern: int,
        residual_out: Tensor,
        norm_out: Tensor,
        residual_in: Tensor,
        rms_gamma: Tensor,
        rms_eps: float,
        use_oneshot: bool,
        fp32_acc: bool,
    ) -> Tensor:
        assert (pattern, use_oneshot, fp32_acc) == (1, True, True)
        total = factor * workspace._ranks.sum(input.float()) + residual_in.float()
        residual_out.copy_(total)
        weight, shape = rms_gamma.float(), (input.shape[-1],)
        return norm_out.copy_(torch.nn.functional.rms_norm(total, shape, weight, rms_eps))

    return SimpleNamespace(
        create_allreduce_fusion_workspace=make_workspace,
        allreduce_fusion=fused,
        AllReduceFusionPattern=SimpleNamespace(kARResidualRMSNorm=1),
    )


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    def install(comm: Any) -> None:
        monkeypatch.setattr(flashinfer_sums, "find_spec", lambda _: object())
        monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(comm=comm))

    return install


def drawn(rank: int, num_tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's part, and what all ranks have alike: the residual stream and the weight."""
    own, same = (torch.Generator().manual_seed(seed) for seed in (100 + rank, 7))
    x = torch.randn((num_tokens, HIDDEN), generator=own).to(dtype)
    hidden = torch.randn((num_tokens, HIDDEN), generator=same).to(dtype)
    return x, hidden, torch.randn(HIDDEN, generator=same).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("num_tokens", [0, 1, 5, MAX_TOKENS, MAX_TOKENS + 1])
def test_a_fused_norm_gives_what_the_sum_and_the_norm_give(
    num_tokens: int, dtype: torch.dtype, tmp_path: Path, install: Callable[[Any], None]
) -> None:
    """It takes halves of up to MAX_TOKENS tokens, and leaves the rest to the plain operators."""
    install(fake_flashinfer())

    def run(ranks: GroupCollectives) -> list[tuple[Tensor, Tensor]]:
        fused = flashinfer_sum_norm(ranks, ranks, HIDDEN, CPU, torch.bfloat16)
        assert fused is not None
        x, hidden, weight = drawn(ranks.rank, num_tokens, dtype)
        is_taken = dtype != torch.float32 and 0 < num_tokens <= MAX_TOKENS
        assert (fused(x.clone(), hidden, weight, EPS) is not None) == is_taken
        norm = with_fusable_norms(PLAIN, ranks).add_norm(weight, eps=EPS, scale=1.0)
        assert isinstance(norm, RankAddNorm)
        plain = norm(hidden, ranks.sum(x.clone()))
        norm.fused = fused
        return [plain, norm(hidden, x.clone()), sum_norm_ref(ranks, x, hidden, weight, EPS)]

    first, *others = on_ranks(tmp_path / "store", run)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for each in (*first, *(pair for found in others for pair in found)):
        for got, expected in zip(each, first[0], strict=True):
            torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def test_a_kernel_that_sums_wrongly_on_one_rank_is_left_out_on_all(
    tmp_path: Path, install: Callable[[Any], None]
) -> None:
    install(fake_flashinfer(factor=1.5))
    found = on_ranks(
        tmp_path / "store", lambda ranks: flashinfer_sum_norm(ranks, ranks, 24, CPU, torch.bfloat16)
    )
    assert found == [None, None]


def without_ninja(**_: object) -> None:
    raise FileNotFoundError("No such file or directory: 'ninja'")


@pytest.mark.parametrize("found", [{}, {"create_allreduce_fusion_workspace": without_ninja}])
def test_ranks_sum_without_a_kernel_that_cannot_be_imported_or_compiled(
    found: dict[str, Any], tmp_path: Path, install: Callable[[Any], None]
) -> None:
    install(SimpleNamespace(**found))
    if not found:
        vars(sys.modules["flashinfer"]).clear()
    made = on_ranks(
        tmp_path / "store", lambda ranks: flashinfer_sum_norm(ranks, ranks, 24, CPU, torch.bfloat16)
    )
    assert made == [None, None]


def test_ranks_exchange_what_flashinfer_sends(tmp_path: Path) -> None:
    def run(ranks: GroupCollectives) -> list[object]:
        comm = HostComm(ranks)
        comm.barrier()
        sent: list[str | bytes | bool] = [
            f"/tmp/{ranks.rank}.sock",
            bytes([ranks.rank, 0, 0]),
            ranks.rank == 0,
        ]
        return [*(comm.allgather(each) for each in sent), comm.bcast(f"{ranks.rank}", 1)]

    expected = [("/tmp/0.sock", "/tmp/1.sock"), (b"\0\0\0", b"\1\0\0"), (True, False), "1"]
    assert on_ranks(tmp_path / "store", run) == [expected, expected]
