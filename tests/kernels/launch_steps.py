"""Prints how many specialisations of each kernel the steps of many sizes launch.

Triton compiles a kernel anew for other dtypes and constants, and for pointers and integers that are
multiples of 16 or not. A specialisation that warm-up has not launched is compiled while requests
wait. This is a program of its own, so that kernels are defined without the interpreter; it computes
nothing.
"""

from __future__ import annotations

import sys
from collections import defaultdict

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from aserve.gpu.cudagraph.warmup import padding_batch
from aserve.gpu.device.cuda.ops import triton_resolve
from aserve.gpu.sampling.plan import RowParams
from aserve.gpu.step.plan import plan_step
from aserve.gpu.step.resolve import DeviceState, DeviceStep
from aserve.gpu.transfer.staging import HostArrays
from aserve_kernels.gated_mul import gated_mul
from aserve_kernels.kv_indices import kv_indices
from aserve_kernels.kv_indptr import KvIndptr, kv_indptr
from aserve_kernels.paged_decode import paged_decode
from aserve_kernels.paged_extend import paged_extend
from aserve_kernels.paged_rows import PagedRows, Scoring
from aserve_kernels.paged_tiles import KvSplits
from aserve_kernels.relay_rows import scatter_rows
from aserve_kernels.rms_norm import add_rms_norm, rms_norm
from aserve_kernels.rope_and_store_kv import rope_and_store_kv
from aserve_kernels.sample import sample
from tests.gpu.device_tables import make_tables, to_device

# Rows, and tokens of each row.
STEPS = [(1, 1), (1, 2), (2, 1), (3, 1), (4, 1), (5, 3), (16, 1), (3, 16), (17, 5), (32, 1)]
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, VOCAB = 6, 2, 64, 5000
BACKEND = make_backend(GPUTarget("cuda", 90, 32))


class Launches:
    """Replaces the launch of a kernel; `kinds` collects the specialisations of each kernel."""

    def __init__(self) -> None:
        self.kinds: dict[str, set[str]] = defaultdict(set)

    def run(self, kernel: JITFunction, *args: object, **kwargs: object) -> None:
        bind = create_function_from_signature(kernel.signature, kernel.params, BACKEND)
        _, specialisation, options = bind(*args, **kwargs)
        self.kinds[kernel.__name__].add(f"{specialisation} {options}")


def launch_step(num_rows: int, width: int, state: DeviceState) -> None:
    """Launches the kernels of one step, from its packed inputs to its tokens."""
    batch = padding_batch(width, num_groups=1, num_rows=num_rows)
    plan = plan_step(batch, RowParams(0), vocab_size=VOCAB, slice_len=1000)
    host = HostArrays()
    plan.stage(host)
    sections = to_device(host)
    step = triton_resolve(plan, sections, state)
    attend(step, state)
    hidden = torch.zeros((num_rows * width, 128), dtype=torch.bfloat16)
    rms_norm(hidden, hidden[0], 1e-6)
    add_rms_norm(hidden, hidden, hidden[0], 1e-6)
    gated_mul(hidden, "silu")
    logits = torch.zeros((num_rows, VOCAB))
    rows = step.batch.token_rows
    rows = rows if width == 1 else rows.index_select(0, sections.ints("logits_tokens") * 0)
    ints, floats = state.tables.int_table, state.tables.float_table
    tokens, _ = sample(logits, rows, rows + 1, ints, floats, has_noise=True, has_limits=True)
    scatter_rows(
        state.relay.table("last_token"),
        sections.ints("sample_rows"),
        tokens,
        state.relay.written_iter,
        sections.ints("iteration"),
    )


def attend(step: DeviceStep, state: DeviceState) -> None:
    """Launches both attention kernels, and those that write FlashInfer's page indices."""
    placed = step.batch
    num_tokens = len(placed.cache_positions)
    heads = torch.zeros((num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM), dtype=torch.bfloat16)
    cos_sin = torch.zeros((num_tokens, HEAD_DIM), dtype=torch.bfloat16)
    pool = torch.zeros((64, NUM_KV_HEADS, HEAD_DIM), dtype=torch.bfloat16)
    q = rope_and_store_kv(heads, placed.slots[0], (pool, pool), cos_sin=cos_sin)
    table, rows = state.pools.page_tables[0], step.batch.rows
    paged = PagedRows(table, 4, rows, placed.lens, placed.cu_query_lens, max_len=80)
    for attention in (paged_decode, paged_extend):
        attention(q, pool, pool, paged, Scoring(0.1), out=torch.empty_like(q), splits=KvSplits())
    starts = torch.zeros(len(rows) + 1, dtype=torch.int32)
    firsts = torch.zeros(len(rows), dtype=torch.int32)
    indptr = KvIndptr(firsts, starts, torch.zeros_like(firsts))
    kv_indptr(placed.lens, placed.cu_query_lens, window=40, page_size=4, out=indptr)
    kv_indices(table, rows, first_columns=firsts, indptr=starts, out=torch.zeros_like(firsts))


def main() -> None:
    launches = Launches()
    JITFunction.run = lambda kernel, *args, grid, warmup, **kwargs: launches.run(
        kernel, *args, **kwargs
    )
    state = make_tables()
    for num_rows, width in STEPS:
        launch_step(num_rows, width, state)
    for name, kinds in sorted(launches.kinds.items()):
        sys.stdout.write(f"{name} {len(kinds)}\n")
        if len(kinds) > 1:
            sys.stderr.write("\n".join((name, *sorted(kinds), "")))


if __name__ == "__main__":
    main()
