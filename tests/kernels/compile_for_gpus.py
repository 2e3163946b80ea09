"""Compiles every Triton kernel to machine code for the supported GPUs, without a GPU.

This finds errors that Triton's interpreter does not. It is a program of its own, so that kernels
are defined without the interpreter. The wrappers run unchanged, but each launch compiles its kernel
instead, once for each specialisation: other dtypes and constants, and pointers and integers that
are multiples of 16 or not. A specialisation that warm-up has not launched would be compiled while
requests wait, so steps of all sizes must launch the same ones.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from aserve.gpu.cudagraph.warmup import padding_batch
from aserve.gpu.device.cuda.ops import triton_resolve
from aserve.gpu.sampling.plan import RowParams
from aserve.gpu.step.plan import plan_step
from aserve.gpu.step.resolve import DeviceState, DeviceStep
from aserve.gpu.transfer.staging import HostArrays
from aserve_kernels import bitmask, early_launch
from aserve_kernels.copy_rows import copy_rows
from aserve_kernels.delta_rule import DeltaRows, DeltaStates, DeltaTokens, StateSpace
from aserve_kernels.delta_step import advance_rows
from aserve_kernels.few_rows_linear import few_rows_linear
from aserve_kernels.fp8_linear import GROUP, fp8_linear, quantize_rows
from aserve_kernels.gated_mul import KINDS, gated_mul
from aserve_kernels.grouped_coded_linear import CodedExperts, grouped_coded_linear
from aserve_kernels.grouped_linear import grouped_linear
from aserve_kernels.index_scores import index_scores
from aserve_kernels.invariant_linear import WIDE_FROM, invariant_linear
from aserve_kernels.kv_indices import kv_indices
from aserve_kernels.kv_indptr import KvIndptr, kv_indptr
from aserve_kernels.latent_decode import TokenTrees, latent_decode
from aserve_kernels.packed_mask import ListedKeys, PackedMask, packed_mask
from aserve_kernels.paged_decode import paged_decode
from aserve_kernels.paged_extend import paged_extend
from aserve_kernels.paged_rows import PagedRows, Scoring, TreeMask
from aserve_kernels.paged_tiles import Chip, KvSplits
from aserve_kernels.penalties import penalise
from aserve_kernels.prepare_inputs import PackedInputs, Tables, prepare_inputs
from aserve_kernels.punica import add_lora
from aserve_kernels.relay_rows import gather_rows, scatter_rows
from aserve_kernels.rms_norm import add_rms_norm, rms_norm
from aserve_kernels.rope_and_store_kv import rope_and_store_kv
from aserve_kernels.row_columns import FLOAT_COLUMNS, INT_COLUMNS
from aserve_kernels.sample import sample
from aserve_kernels.weight_only_linear import FEW_TOKENS, CodedMatrix, weight_only_linear
from tests.gpu.device_tables import make_tables, to_device
from tests.kernels import paged_case
from tests.kernels.lora_case import Shape, draw_case

AMPERE, ADA, HOPPER = 80, 89, 90
SHARED_BYTES = {AMPERE: 163 << 10, ADA: 99 << 10, HOPPER: 227 << 10}  # that a program may use
H200 = KvSplits(Chip(132, SHARED_BYTES[HOPPER]))  # whose tiles have more stages
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
# Kernels whose loop over tiles must be software-pipelined with asynchronous copies (cp.async).
PIPELINED = (
    *("_attend_splits", "_attend_latents", "_attend_blocks", "_multiply"),
    *("_multiply_codes", "_multiply_experts", "_multiply_fp8"),
)
# Kernels that may be launched before the one before them has ended.
EARLY = ("._norm", "._add_norm", "._gated", "._rope_and_store", "._multiply_rows", "._add_parts")
# Rows, and tokens of each row.
STEPS = [(1, 1), (1, 2), (2, 1), (3, 1), (4, 1), (5, 3), (16, 1), (3, 16), (17, 5), (32, 1)]
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, VOCAB = 6, 2, 64, 5000


class Compiler:
    """Replaces the launch of a kernel by its compilation; `kinds` has the specialisations of each
    kernel."""

    def __init__(self, capability: int) -> None:
        self.kinds: dict[str, set[str]] = defaultdict(set)
        self._target = GPUTarget("cuda", capability, 32)
        self._backend = make_backend(self._target)
        self._is_early = capability >= HOPPER
        self._shared_bytes = SHARED_BYTES[capability]

    def compile(self, calls: Iterable[Callable[[], object]]) -> None:
        JITFunction.run = lambda kernel, *args, grid, warmup, **kwargs: self.run(
            kernel, *args, **kwargs
        )
        vars(early_launch)["is_supported"] = lambda _device: self._is_early
        for call in calls:
            call()

    def run(self, kernel: JITFunction, *args: object, **kwargs: object) -> None:
        bind = create_function_from_signature(kernel.signature, kernel.params, self._backend)
        bound, specialisation, given = bind(*args, **kwargs)
        name, kind = f"{kernel.fn.__module__}.{kernel.__name__}", f"{specialisation} {given}"
        if kind in self.kinds[name]:
            return
        self.kinds[name].add(kind)
        options, *parts = kernel._pack_args(self._backend, kwargs, bound, specialisation, given)
        source = ASTSource(kernel, *parts)
        made = triton.compile(source, target=self._target, options=vars(options))
        shared = made.metadata.shared
        assert shared <= self._shared_bytes, f"{name} takes {shared} bytes of shared memory"
        is_early = self._is_early and name.endswith(EARLY)
        assert options.launch_pdl == is_early, f"{name} is launched early, or is not"
        assert ("griddepcontrol.wait" in made.asm["ptx"]) == is_early, f"{name} waits, or does not"
        if name.endswith(PIPELINED) and options.num_stages > 1:
            assert "cp.async" in made.asm["ptx"], f"{name} has no asynchronous copies"


def zeros(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def launch_step(num_rows: int, width: int, state: DeviceState) -> None:
    """Launches the kernels of one step, from its packed inputs to its tokens."""
    batch = padding_batch(width, num_groups=1, num_rows=num_rows)
    plan = plan_step(batch, RowParams(0), vocab_size=VOCAB, slice_len=1000)
    host = HostArrays()
    plan.stage(host)
    sections = to_device(host)
    step = triton_resolve(plan, sections, state)
    launch_attention(step, state)
    hidden = zeros(num_rows * width, 128)
    rms_norm(hidden, hidden[0], 1e-6)
    add_rms_norm(hidden, hidden, hidden[0], 1e-6)
    gated_mul(hidden, "silu")
    rows = step.batch.token_rows
    rows = rows if width == 1 else rows.index_select(0, sections.ints("logits_tokens") * 0)
    ints, floats = state.tables.int_table, state.tables.float_table
    logits = zeros(num_rows, VOCAB, dtype=torch.float32)
    tokens, _ = sample(logits, rows, rows + 1, ints, floats, has_noise=True, has_limits=True)
    written, iteration = state.relay.written_iter, sections.ints("iteration")
    table, rows = state.relay.table("last_token"), sections.ints("sample_rows")
    scatter_rows(table, rows, tokens, written, iteration)


def launch_attention(step: DeviceStep, state: DeviceState) -> None:
    """Both attention kernels, and those that write FlashInfer's page indices."""
    placed = step.batch
    num_tokens = len(placed.cache_positions)
    heads = zeros(num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM)
    pool = zeros(64, NUM_KV_HEADS, HEAD_DIM)
    cos_sin = zeros(num_tokens, HEAD_DIM)
    q = rope_and_store_kv(heads, placed.slots[0], (pool, pool), cos_sin=cos_sin)
    table, rows = state.pools.page_tables[0], placed.rows
    paged = PagedRows(table, 4, rows, placed.lens, placed.cu_query_lens, max_len=80)
    for attention in (paged_decode, paged_extend):
        attention(q, pool, pool, paged, Scoring(0.1), out=torch.empty_like(q), splits=KvSplits())
    firsts = zeros(len(rows), dtype=torch.int32)
    out = KvIndptr(firsts, zeros(len(rows) + 1, dtype=torch.int32), torch.zeros_like(firsts))
    kv_indptr(placed.lens, placed.cu_query_lens, window=40, page_size=4, out=out)
    indices = torch.zeros_like(firsts)
    kv_indices(table, rows, first_columns=firsts, indptr=out.indptr, out=indices)


def call_rope_and_store_kv(dtype: torch.dtype) -> None:
    """RoPE on part of a head; on whole heads, with QK norm; none, as where the model applies it."""
    heads, slots = zeros(2, 7, 128), torch.tensor([1, 2])
    pools = (zeros(4, 2, 128, dtype=dtype), zeros(4, 2, 128, dtype=dtype))
    for cos_sin, weight in ((heads[:, 0, :64], None), (heads[:, 0], torch.zeros((5, 128)))):
        rope_and_store_kv(heads, slots, pools, cos_sin=cos_sin, weight=weight)
    rope_and_store_kv(heads, slots, pools, cos_sin=None)


def call_few_rows_linear() -> None:
    """Sums that are split and a sum that is not, for one token and for several."""
    for num_tokens, num_outs in ((1, 64), (3, 64), (2, 10_000)):
        few_rows_linear(zeros(num_tokens, 512), zeros(num_outs, 512), zeros(num_outs))


def call_grouped_linear() -> None:
    bounds = torch.tensor([0, 2, 4], dtype=torch.int32)
    grouped_linear(zeros(4, 128), zeros(2, 100, 128), zeros(2, 100), bounds[:2], bounds[1:])


def call_grouped_coded_linear() -> None:
    """Two experts of each format."""
    bounds = torch.tensor([0, 2, 4], dtype=torch.int32)
    for weight in coded_matrices():
        codes, scales, offsets = (
            None if each is None else torch.stack([each.view(torch.uint8)] * 2).view(each.dtype)
            for each in weight[:3]
        )
        assert codes is not None
        assert scales is not None
        weights = CodedExperts(codes, scales, offsets, *weight[3:])
        grouped_coded_linear(zeros(4, 512), weights, zeros(2, 256), bounds[:2], bounds[1:])


def call_invariant_linear(num_outs: int) -> None:
    invariant_linear(zeros(2, 128), zeros(num_outs, 128), zeros(num_outs))


def coded_matrix(dtype: torch.dtype, *, group: int, rows: int = 1) -> CodedMatrix:
    """A weight [256, 512], of 4 bits if dtype is uint8."""
    is_4_bits = dtype == torch.uint8
    codes = zeros(256, 256 if is_4_bits else 512, dtype=dtype)
    scales = zeros(512 // group, 256 // rows, dtype=torch.float32)
    return CodedMatrix(codes, scales, scales if is_4_bits else None, 512, group, rows)


def coded_matrices() -> tuple[CodedMatrix, ...]:
    """Returns blocks of fp8, a scale per row of fp8 and int8, groups of 4 bits, and MXFP4."""
    return (
        coded_matrix(FP8, group=128, rows=128),
        coded_matrix(FP8, group=512),
        coded_matrix(torch.int8, group=512),
        coded_matrix(torch.uint8, group=128),
        coded_matrix(torch.uint8, group=32),
        coded_matrix(torch.uint8, group=32)._replace(offsets=None, is_e2m1=True),
    )


def call_weight_only_linear() -> None:
    """Few tokens with a split sum, many in tiles."""
    for weight in coded_matrices():
        for num_tokens in (2, FEW_TOKENS + 1):
            weight_only_linear(zeros(num_tokens, 512), weight, zeros(256))


def call_fp8_linear() -> None:
    """Blocks, and one scale per token and output, given or not."""
    x = zeros(32, 512)
    fp8_linear(quantize_rows(x, GROUP), coded_matrix(FP8, group=128, rows=128), None, dtype=BF16)
    for given in (None, zeros(1, dtype=torch.float32)):
        rows = quantize_rows(x, 512, given)
        fp8_linear(rows, coded_matrix(FP8, group=512), zeros(256), dtype=BF16)


def call_paged(**changes: object) -> None:
    rows = ((1, 70), (40, 90))
    case = paged_case.Case(rows, heads=(16, 4), head_dim=128, dtype=BF16)
    case = replace(case, **changes)  # type: ignore[arg-type]  # fields by name
    paged_case.run(paged_case.OPS, paged_case.make_inputs(case), case)


def call_latent_decode(
    num_tokens: int = 2,
    *,
    dtype: torch.dtype = BF16,
    kv_dtype: torch.dtype | None = None,
    splits: KvSplits | None = None,
    has_trees: bool = False,
) -> None:
    """The sizes of DeepSeek-V3."""
    lens, starts = torch.tensor([5] * num_tokens), torch.arange(num_tokens + 1)
    paged = PagedRows(zeros(9, 8, dtype=torch.int64), 16, lens, lens, starts, max_len=4096)
    q, out = (zeros(num_tokens, 128, size, dtype=dtype) for size in (576, 512))
    latents = zeros(16, 1, 576, dtype=kv_dtype or dtype)
    seen = zeros(num_tokens, 4, dtype=torch.bool)
    latent_decode(
        q, latents, paged, Scoring(0.1), out=out, splits=splits or KvSplits(),
        trees=TokenTrees(seen, lens) if has_trees else None,
    )  # fmt: skip


def call_index_scores() -> None:
    """The sizes of DeepSeek-V3.2, and bounds of the lengths that are a multiple of 16 or not."""
    joined, starts = zeros(2, 65, 128), torch.arange(3)
    for max_len in (4096, 999):
        paged = PagedRows(
            zeros(9, 256, dtype=torch.int64), 16, starts[:2], starts[:2], starts, max_len=max_len
        )
        index_scores(joined[:, :-1], zeros(2, 64), zeros(64, 128), paged)


def call_advance_rows(sizes: tuple[int, int, int], num_keys: int, *, is_space: bool) -> None:
    """Few rows and many, without and with drafts."""
    num_heads, key_dim, value_dim = sizes
    num_channels = 2 * num_keys * key_dim + num_heads * value_dim
    f32 = torch.float32
    space = StateSpace(zeros(num_channels, dtype=f32), zeros(num_heads, dtype=f32))
    for num_rows, num_places in ((1, 1), (16, 1), (16, 4)):
        tokens = DeltaTokens(
            zeros(num_rows, 2 * num_channels)[:, :num_channels],
            zeros(num_channels, 4),
            zeros(num_rows, num_heads, dtype=f32),
            zeros(num_rows, num_heads),
            space if is_space else None,
        )
        lens = torch.ones(num_rows, dtype=torch.int64)
        matrices = zeros(17, num_places, *sizes, dtype=torch.float32)
        states = DeltaStates(matrices, zeros(17, num_places + 3, num_channels))
        rows = DeltaRows(lens, lens, lens, torch.arange(num_rows + 1), lens, lens.int().numpy())
        advance_rows(tokens, rows, states)


def row_tables() -> tuple[Tensor, Tensor]:
    ints = zeros(4, len(INT_COLUMNS), dtype=torch.int64)
    return ints, torch.ones((4, len(FLOAT_COLUMNS)), dtype=torch.float64)


def call_sample(vocab_size: int, dtype: torch.dtype, *, has_noise: bool) -> None:
    logits, rows = zeros(2, vocab_size, dtype=dtype), torch.tensor([1, 3])
    sample(logits, rows, rows, *row_tables(), has_noise=has_noise, has_limits=False)


def call_prepare_inputs(num: int) -> None:
    some, table = zeros(num, dtype=torch.int32), zeros(4, 8, dtype=torch.int64)
    words = PackedInputs(some, some, some, some, some, some, some)
    prepare_inputs(words, Tables(table[:, 0], table[:, 0], (table, table), some, page_size=16))


def call_gather_rows(table: Tensor) -> None:
    rows = torch.tensor([1, 2])
    gather_rows(table, rows)
    scatter_rows(table, rows, table[:2], rows, rows)


def call_penalise() -> None:
    logits, rows = zeros(2, 9000, dtype=torch.float32), torch.tensor([1, 3])
    of_tokens = (zeros(4, 8, dtype=torch.int64), zeros(64, dtype=torch.int32), 16)
    penalise(logits, rows, rows, rows, row_tables(), of_tokens, 100)


def call_kv_indptr() -> None:
    lens, firsts = torch.tensor([1, 3, 5]), zeros(2, dtype=torch.int32)
    out = KvIndptr(firsts, zeros(3, dtype=torch.int32), firsts)
    kv_indptr(lens[:2], lens, window=None, page_size=16, out=out)


def call_packed_mask() -> None:
    """Trees whose mask has 16 columns or not, with a window or without."""
    lens, ends = torch.tensor([30, 20]), torch.tensor([0, 5, 16])
    firsts = zeros(2, dtype=torch.int32)
    for width, window in ((16, None), (5, 8)):
        seen = zeros(16, width, dtype=torch.bool)
        tree = TreeMask(seen, zeros(16, dtype=torch.int64))
        out = PackedMask(zeros(64, dtype=torch.uint8), zeros(3, dtype=torch.int32))
        packed_mask(tree, ListedKeys(lens, ends, firsts, 16, 64), window=window, out=out)


def call_add_lora() -> None:
    """As the attention and the MLP of a model have it, at ranks that are powers of two or not."""
    for shape, num_tokens in (((9, 16, 128, (96, 32, 32)), 4), ((9, 12, 96, (128,)), 1)):
        case = draw_case(Shape(*shape), num_tokens, BF16)
        add_lora(case.y, case.x, case.slots, case.stack)


# Kernels with matrix products, which differ most between architectures.
PRODUCTS: tuple[Callable[[], object], ...] = (
    call_paged,
    call_latent_decode,
    call_index_scores,
    lambda: call_invariant_linear(300),
    call_grouped_linear,
    call_grouped_coded_linear,
    call_weight_only_linear,
)
EARLY_CALLS: tuple[Callable[[], object], ...] = (
    lambda: rms_norm(zeros(2, 128), zeros(128), 1e-6),
    lambda: add_rms_norm(zeros(2, 128), zeros(2, 128), zeros(128), 1e-6),
    lambda: gated_mul(zeros(2, 256), "silu"),
    lambda: call_rope_and_store_kv(BF16),
    call_few_rows_linear,
)
LATENTS: tuple[Callable[[], object], ...] = (
    lambda: call_latent_decode(500),
    lambda: call_latent_decode(has_trees=True),
    lambda: call_latent_decode(kv_dtype=FP8),
    lambda: call_latent_decode(kv_dtype=FP8, has_trees=True),
    lambda: call_latent_decode(splits=KvSplits(fixed_split=1024)),
    lambda: call_latent_decode(dtype=torch.float32, has_trees=True),
)
# Kernels and variants that no step in STEPS launches.
OTHERS: tuple[Callable[[], object], ...] = (
    *PRODUCTS,
    lambda: call_paged(splits=KvSplits(fixed_split=1024)),
    lambda: call_paged(splits=H200),
    lambda: call_paged(dtype=torch.float32, splits=H200),
    lambda: call_paged(head_dim=256, scoring=Scoring(0.1, window=30, softcap=50.0)),
    lambda: call_paged(kv_dtype=FP8),
    lambda: call_paged(has_trees=True),
    lambda: call_paged(has_trees=True, scoring=Scoring(0.1, window=30)),
    lambda: call_paged(scoring=Scoring(0.1, is_causal=False)),
    lambda: call_paged(scoring=Scoring(0.1, window=30, is_causal=False)),
    *LATENTS,
    lambda: call_latent_decode(splits=H200),
    lambda: call_invariant_linear(WIDE_FROM),
    call_fp8_linear,
    call_few_rows_linear,
    *(partial(gated_mul, zeros(2, 600), kind) for kind in KINDS),
    lambda: call_rope_and_store_kv(BF16),
    lambda: call_rope_and_store_kv(FP8),
    lambda: call_sample(9000, BF16, has_noise=False),
    lambda: call_sample(1, torch.float32, has_noise=True),
    lambda: call_prepare_inputs(1),
    lambda: call_prepare_inputs(3),
    lambda: call_gather_rows(zeros(4, dtype=torch.int64)),
    lambda: call_gather_rows(zeros(4, 3)),
    call_penalise,
    lambda: bitmask.apply_bitmask(torch.zeros((2, 9000)), zeros(2, 282, dtype=torch.int32)),
    call_kv_indptr,
    partial(call_advance_rows, (16, 128, 128), 16, is_space=False),  # Qwen3.5
    partial(call_advance_rows, (48, 128, 64), 1, is_space=True),  # Granite 4
    lambda: copy_rows(
        zeros(9, 600), zeros(4, dtype=torch.int64), zeros(9, 600), zeros(4, dtype=torch.int64)
    ),
    call_packed_mask,
    call_add_lora,
)


def launched_kernels() -> set[str]:
    """Those that the wrappers launch, by the syntax of a launch."""
    return {
        f"aserve_kernels.{file.stem}.{name}"
        for file in Path(bitmask.__file__).parent.glob("*.py")
        for name in re.findall(r"^ +(_\w+)\[", file.read_text(), re.MULTILINE)
    }


def main() -> None:
    """Prints each kernel and the number of specialisations that the steps launch of it."""
    Compiler(AMPERE).compile((*PRODUCTS, *EARLY_CALLS))
    Compiler(ADA).compile(LATENTS)
    hopper, state = Compiler(HOPPER), make_tables()
    hopper.compile(partial(launch_step, *step, state) for step in STEPS)
    for name, kinds in sorted(hopper.kinds.items()):
        sys.stdout.write(f"{name} {len(kinds)}\n")
        if len(kinds) > 1:
            sys.stderr.write("\n".join((name, *sorted(kinds), "")))
    hopper.compile(OTHERS)
    if missing := launched_kernels() - hopper.kinds.keys():
        sys.exit(f"never launched here: {sorted(missing)}")


if __name__ == "__main__":
    main()
