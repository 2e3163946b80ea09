"""The cases of `aserve bench kernels`: each kernel with inputs in the shapes of an 8B model, and
the number of bytes that it must move at least.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from aserve_kernels.bitmask import apply_bitmask
from aserve_kernels.few_rows_linear import FEW_ROWS, few_rows_linear
from aserve_kernels.gated_mul import gated_mul
from aserve_kernels.paged_decode import paged_decode
from aserve_kernels.paged_rows import PagedRows, Scoring
from aserve_kernels.paged_tiles import KvSplits
from aserve_kernels.penalties import penalise
from aserve_kernels.prepare_inputs import PackedInputs, Tables, prepare_inputs
from aserve_kernels.relay_rows import gather_rows, scatter_rows
from aserve_kernels.rms_norm import add_rms_norm, rms_norm
from aserve_kernels.rope_and_store_kv import rope_and_store_kv
from aserve_kernels.row_columns import FLOAT_COLUMNS, INT_COLUMNS
from aserve_kernels.sample import sample

PAGE_SIZE = 16
EPS = 1e-6
# The sampling parameters of each row.
FLOATS = {"temperature": 0.7, "top_p": 0.95, "min_p": 0.0, "repetition_penalty": 1.1}
TOP_K = 20


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of the inputs. They must be so large that no cache holds the inputs and the launch
    overhead is negligible.
    """

    tokens: int  # of a forward pass
    rows: int  # of logits
    context_len: int  # keys of each row
    hidden: int = 4096
    intermediate: int = 12_288
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 151_936


@dataclass(frozen=True, slots=True)
class Case:
    work: Callable[[], object]
    num_bytes: int


def make_norm(sizes: Sizes, device: torch.device) -> Case:
    x = _draw((sizes.tokens, sizes.hidden), device)
    return Case(lambda: rms_norm(x, x[0], EPS), 2 * x.nbytes)


def make_add_norm(sizes: Sizes, device: torch.device) -> Case:
    x, added = (_draw((sizes.tokens, sizes.hidden), device) for _ in range(2))
    return Case(lambda: add_rms_norm(x, added, x[0], EPS), 4 * x.nbytes)


def make_gated_mul(sizes: Sizes, device: torch.device) -> Case:
    joined = _draw((sizes.tokens, 2 * sizes.intermediate), device)
    return Case(lambda: gated_mul(joined, "silu"), joined.nbytes * 3 // 2)


def make_linear(
    sizes: Sizes, device: torch.device, *, num_rows: int, op: Callable[[Tensor, Tensor], Tensor]
) -> Case:
    """The gates of an MLP for few tokens."""
    x, weight = (_draw((rows, sizes.hidden), device) for rows in (num_rows, 2 * sizes.intermediate))
    return Case(lambda: op(x, weight), weight.nbytes)


def make_rope_and_store_kv(sizes: Sizes, device: torch.device) -> Case:
    """A projection of q, k and v, of which q and k are normed. Each is read and written once."""
    num_rope_heads = sizes.heads + sizes.kv_heads
    heads = _draw((sizes.tokens, num_rope_heads + sizes.kv_heads, sizes.head_dim), device)
    cos_sin = _draw((sizes.tokens, sizes.head_dim), device)
    weight = torch.ones((num_rope_heads, sizes.head_dim), device=device)
    keys = torch.zeros((sizes.tokens, sizes.kv_heads, sizes.head_dim), device=device).bfloat16()
    pools, slots = (keys, keys.clone()), torch.randperm(sizes.tokens, device=device)
    work = partial(rope_and_store_kv, heads, slots, pools, cos_sin=cos_sin, weight=weight, eps=EPS)
    return Case(work, 2 * heads.nbytes + cos_sin.nbytes)


def make_paged_decode(sizes: Sizes, device: torch.device) -> Case:
    """One query per row. The rows have 4 * `tokens` keys together."""
    num_rows = max(1, sizes.tokens * 4 // sizes.context_len)
    num_pages = -(-sizes.context_len // PAGE_SIZE)
    shape = (2, num_rows * num_pages * PAGE_SIZE, sizes.kv_heads, sizes.head_dim)
    kv = _draw(shape, device)
    pages = torch.randperm(num_rows * num_pages, device=device).view(num_rows, num_pages)
    rows = torch.arange(num_rows, device=device)
    paged = PagedRows(
        page_table=pages,
        page_size=PAGE_SIZE,
        rows=rows,
        lens=torch.full_like(rows, sizes.context_len),
        cu_query_lens=torch.arange(num_rows + 1, device=device),
        max_len=sizes.context_len,
    )
    q = _draw((num_rows, sizes.heads, sizes.head_dim), device)
    out, scoring = torch.empty_like(q), Scoring(scale=sizes.head_dim**-0.5)

    def attend() -> None:
        paged_decode(q, kv[0], kv[1], paged, scoring, out=out, splits=KvSplits())

    return Case(attend, kv.nbytes + 2 * q.nbytes)


def make_prepare_inputs(sizes: Sizes, device: torch.device) -> Case:
    """A decode step in which each token is a row."""
    some = torch.arange(sizes.tokens, dtype=torch.int32, device=device)
    ones = torch.ones_like(some)
    words = PackedInputs(some, ones, ones, ones, some, 0 * some, -some)
    table = some.long()
    pool = torch.zeros(sizes.tokens * PAGE_SIZE, dtype=torch.int32, device=device)
    tables = Tables(table, None, (table[:, None],), pool, PAGE_SIZE)
    read, written = 5 * some.nbytes + 2 * table.nbytes, 7 * table.nbytes + some.nbytes
    return Case(lambda: prepare_inputs(words, tables), read + written)


def make_gather_rows(sizes: Sizes, device: torch.device) -> Case:
    """Rows of hidden states, such as a drafter reads."""
    table = _draw((sizes.tokens, sizes.hidden), device)
    rows = torch.randperm(sizes.tokens, device=device)
    return Case(lambda: gather_rows(table, rows), 2 * table.nbytes)


def make_scatter_rows(sizes: Sizes, device: torch.device) -> Case:
    table, values = (_draw((sizes.tokens, sizes.hidden), device) for _ in range(2))
    rows = torch.randperm(sizes.tokens, device=device)
    stamps = torch.zeros_like(rows)
    work = partial(scatter_rows, table, rows, values, stamps, rows[:1])
    return Case(work, 2 * table.nbytes)


def make_draw(sizes: Sizes, device: torch.device, *, has_noise: bool, has_limits: bool) -> Case:
    """Sampling from bfloat16 logits."""
    wide, rows = _logits(sizes, device)
    logits = wide.to(torch.bfloat16)
    ints, floats = _row_tables(sizes, device)

    def draw() -> None:
        sample(logits, rows, rows, ints, floats, has_noise=has_noise, has_limits=has_limits)

    return Case(draw, logits.nbytes)


def make_penalise(sizes: Sizes, device: torch.device) -> Case:
    """The logits, and token counts of the same size, are each read and written."""
    logits, rows = _logits(sizes, device)
    num_pages = -(-sizes.context_len // PAGE_SIZE)
    pages = torch.arange(sizes.rows * num_pages, device=device).view(sizes.rows, num_pages)
    pool = torch.randint(sizes.vocab, (pages.numel() * PAGE_SIZE,), device=device).int()
    lens = torch.full_like(rows, sizes.context_len)
    tables, tokens = _row_tables(sizes, device), (pages, pool, PAGE_SIZE)

    def work() -> None:
        penalise(logits, rows, rows, lens, tables, tokens, sizes.context_len)

    return Case(work, 4 * logits.nbytes + pool.nbytes)


def make_bitmask(sizes: Sizes, device: torch.device) -> Case:
    """A mask that bans all tokens."""
    logits, rows = _logits(sizes, device)
    mask = torch.zeros((len(rows), -(-sizes.vocab // 32)), dtype=torch.int32, device=device)
    return Case(lambda: apply_bitmask(logits, mask), logits.nbytes + mask.nbytes)


CASES: Mapping[str, Callable[[Sizes, torch.device], Case]] = {
    "rms_norm": make_norm,
    "add_rms_norm": make_add_norm,
    "gated_mul": make_gated_mul,
    "rope_and_store_kv": make_rope_and_store_kv,
    **{
        f"{name}, {num_rows} tokens": partial(make_linear, num_rows=num_rows, op=op)
        for name, op in (("few_rows_linear", few_rows_linear), ("torch linear", functional.linear))
        for num_rows in (1, FEW_ROWS)
    },
    "paged_decode": make_paged_decode,
    "prepare_inputs": make_prepare_inputs,
    "gather_rows": make_gather_rows,
    "scatter_rows": make_scatter_rows,
    "sample, greedy": lambda s, d: make_draw(s, d, has_noise=False, has_limits=False),
    "sample, noise": lambda s, d: make_draw(s, d, has_noise=True, has_limits=False),
    "sample, limits": lambda s, d: make_draw(s, d, has_noise=True, has_limits=True),
    "penalise": make_penalise,
    "bitmask": make_bitmask,
}


def _draw(shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=device)


def _logits(sizes: Sizes, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns random logits and the row numbers."""
    logits = 4 * torch.randn((sizes.rows, sizes.vocab), device=device)
    return logits, torch.arange(sizes.rows, device=device)


def _row_tables(sizes: Sizes, device: torch.device) -> tuple[Tensor, Tensor]:
    ints = torch.zeros((sizes.rows, len(INT_COLUMNS)), dtype=torch.int64, device=device)
    ints[:, INT_COLUMNS.index("top_k")] = TOP_K
    values = [FLOATS.get(name, 0.5) for name in FLOAT_COLUMNS]
    floats = torch.tensor([values], dtype=torch.float64, device=device)
    return ints, floats.repeat(sizes.rows, 1)
