"""FlashInfer's all-reduce that is fused with the residual sum and the norm (fused_norm.py).

Its one-shot kernel: each rank writes its part into the memory of all others, and adds up the parts
in the order of ranks, in float32. FlashInfer exchanges the handles of that memory through an object
with MPI's methods, which the ranks' gloo group stands for; no default group of torch is needed.

Source: flashinfer/comm/allreduce.py (0.7.2), TensorRT-LLM's allReduceFusionKernels.cu.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from aserve.gpu.attention.flashinfer.kernel_modules import BUILD_ERRORS
from aserve.gpu.parallel.collectives import Collectives
from aserve.gpu.parallel.fused_norm import FusedSumNorm, sum_norm_ref
from aserve.gpu.parallel.host_comm import HostComm

MAX_TOKENS = 128  # as many as the kernel's one-shot mode is made for
DTYPES = (torch.bfloat16, torch.float16)
NUM_RANKS = (2, 4, 8)  # for which FlashInfer has compiled its kernel
BACKEND = "trtllm"
PATTERN = "kARResidualRMSNorm"
TOLERANCE = 2e-2  # bfloat16 has 8 bits

logger = logging.getLogger(__name__)


class FlashInferSumNorm:
    """`run` is a `FusedSumNorm`. `comm` is flashinfer.comm."""

    def __init__(self, comm: Any, workspace: Any) -> None:
        self._run = comm.allreduce_fusion
        self._pattern = getattr(comm.AllReduceFusionPattern, PATTERN)
        self._workspace = workspace

    def run(
        self, x: Tensor, hidden: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        has_one_dtype = x.dtype == hidden.dtype == weight.dtype
        if not has_one_dtype or x.dtype not in DTYPES or not 0 < len(x) <= MAX_TOKENS:
            return None
        total, normed = torch.empty_like(hidden), torch.empty_like(hidden)
        self._run(
            input=x,
            workspace=self._workspace,
            pattern=self._pattern,
            residual_out=total,
            norm_out=normed,
            residual_in=hidden,
            rms_gamma=weight,
            rms_eps=eps,
            use_oneshot=True,
            fp32_acc=True,
        )
        return total, normed


def flashinfer_sum_norm(
    ranks: Collectives, host: Collectives, hidden_size: int, where: torch.device, dtype: torch.dtype
) -> FusedSumNorm | None:
    """Returns FlashInfer's kernel if all ranks have it, and it is right. All ranks call this."""
    can = (
        find_spec("flashinfer") is not None
        and dtype in DTYPES
        and ranks.num_ranks in NUM_RANKS
        and hidden_size * dtype.itemsize % 16 == 0
    )
    if not host.least(can):
        return None
    made = _made(host, hidden_size, dtype)
    if not host.least(made is not None) or made is None:
        return None
    is_right = _is_right(made.run, ranks, hidden_size, where, dtype)
    return made.run if host.least(is_right) else None


def _made(host: Collectives, hidden_size: int, dtype: torch.dtype) -> FlashInferSumNorm | None:
    try:
        from flashinfer import comm

        workspace = comm.create_allreduce_fusion_workspace(
            backend=BACKEND,
            world_size=host.num_ranks,
            rank=host.rank,
            max_token_num=MAX_TOKENS,
            hidden_dim=hidden_size,
            dtype=dtype,
            comm_backend=HostComm(host),
        )
        return FlashInferSumNorm(comm, workspace)
    except BUILD_ERRORS as error:
        logger.warning("sums and norms are not fused, because FlashInfer cannot: %s", error)
        return None


def _is_right(
    run: FusedSumNorm, ranks: Collectives, hidden_size: int, where: torch.device, dtype: torch.dtype
) -> bool:
    """Compares both results of some tokens with the reference. It blocks."""
    draw = torch.Generator().manual_seed(ranks.rank)
    same = torch.Generator().manual_seed(ranks.num_ranks)
    x = torch.randn((3, hidden_size), generator=draw).to(where, dtype)
    hidden = torch.randn((3, hidden_size), generator=same).to(where, dtype)
    weight = torch.randn(hidden_size, generator=same).to(where, dtype)
    found = run(x, hidden, weight, 1e-6)
    expected = sum_norm_ref(ranks, x, hidden, weight, 1e-6)
    return found is not None and all(
        torch.allclose(*each, rtol=TOLERANCE, atol=TOLERANCE)
        for each in zip(found, expected, strict=True)
    )
