"""Packs the masks of draft trees into bits, as FlashInfer's kernels read them.

Row r has query_len queries and `listed` keys: those of its listed pages (kv_indptr.py), from
position `first` on. Bit q * listed + k of its part says whether query q sees key k:

    mask[indptr[r] + i // 8] >> i % 8 & 1,   i = q * listed[r] + k

A query sees the keys before the row's queries, its ancestors and itself, within the window. For the
window, the position of a query is its depth in the tree.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from aserve_kernels.paged_rows import TreeMask

BLOCK = 256  # bytes


@dataclass(frozen=True, slots=True)
class PackedMask:
    """On the device."""

    bits: Tensor  # uint8 [indptr[rows] + 1 or more]; the last byte is not read
    indptr: Tensor  # int32 [rows + 1], in bytes


@dataclass(frozen=True, slots=True)
class ListedKeys:
    """The keys that each row's pages list, in integers on the device."""

    lens: Tensor  # int64 [rows], KV lengths with this step's queries
    cu_query_lens: Tensor  # int64 [rows + 1]
    first_columns: Tensor  # int32 [rows], of the page table
    page_size: int
    max_bytes: int  # a bound of the bytes of a row's mask

    @property
    def query_lens(self) -> Tensor:
        return self.cu_query_lens.diff()

    @property
    def firsts(self) -> Tensor:
        return self.first_columns.to(torch.int64) * self.page_size

    def write_indptr(self, out: Tensor) -> None:
        num_bytes = (self.query_lens * (self.lens - self.firsts) + 7) // 8
        out.copy_(pad(num_bytes.cumsum(0), (1, 0)))


def packed_mask(tree: TreeMask, listed: ListedKeys, *, window: int | None, out: PackedMask) -> None:
    """Writes `out`."""
    listed.write_indptr(out.indptr)
    if not len(listed.lens):
        return
    grid = (len(listed.lens), triton.cdiv(listed.max_bytes, BLOCK))
    _pack[grid](
        tree.seen.view(torch.uint8), tree.depths, tree.seen.stride(0),
        listed.lens, listed.cu_query_lens, listed.first_columns, out.indptr, out.bits,
        listed.page_size, 0 if window is None else window, window is not None, BLOCK,
    )  # fmt: skip


def packed_mask_ref(
    tree: TreeMask, listed: ListedKeys, *, window: int | None, out: PackedMask
) -> None:
    """The same in plain torch. No shape depends on a value, so a graph can capture it: what is
    behind a row's bits goes to the last byte."""
    listed.write_indptr(out.indptr)
    starts, query_lens = listed.cu_query_lens[:-1, None], listed.query_lens[:, None]
    firsts = listed.firsts[:, None]
    num_keys = listed.lens[:, None] - firsts
    places = torch.arange(8 * listed.max_bytes, device=firsts.device)
    queries, positions = places // num_keys, places % num_keys + firsts
    is_bit = queries < query_lens
    tokens = starts + queries.minimum(query_lens - 1)
    nodes = positions - (listed.lens[:, None] - query_lens)
    columns = nodes.clamp(0, tree.seen.shape[1] - 1)
    is_seen = (nodes < 0) | tree.seen[tokens, columns]
    if window is not None:
        of_key = tree.depths[(starts + columns).clamp(max=len(tree.depths) - 1)]
        is_seen &= tree.depths[tokens] - torch.where(nodes < 0, nodes, of_key) < window
    bits = (is_seen & is_bit).view(len(firsts), -1, 8) << torch.arange(8, device=firsts.device)
    targets = out.indptr[:-1, None] + places[: listed.max_bytes]
    is_byte = is_bit.view(len(firsts), -1, 8)[:, :, 0]
    targets = torch.where(is_byte, targets, len(out.bits) - 1)
    out.bits.index_copy_(0, targets.flatten(), bits.sum(dim=2).to(torch.uint8).flatten())


@triton.jit(do_not_specialize=["seen_stride"])
def _pack(
    seen: tl.tensor, depths: tl.tensor, seen_stride: int, lens: tl.tensor,
    cu_query_lens: tl.tensor, first_columns: tl.tensor, indptr: tl.tensor, bits: tl.tensor,
    page_size: int, window: int, HAS_WINDOW: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0)
    start = tl.load(cu_query_lens + row)
    query_len = tl.load(cu_query_lens + row + 1) - start
    kv_len = tl.load(lens + row)
    first = tl.load(first_columns + row).to(tl.int64) * page_size
    num_keys = kv_len - first
    start_byte = tl.program_id(1).to(tl.int64) * BLOCK
    if start_byte * 8 >= query_len * num_keys:
        return
    places = start_byte + tl.arange(0, BLOCK)
    byte = tl.zeros((BLOCK,), tl.int32)
    for bit in tl.static_range(8):
        index = places * 8 + bit
        query = index // num_keys
        is_bit = query < query_len
        node = index % num_keys + first - (kv_len - query_len)
        token = start + tl.minimum(query, query_len - 1)
        is_node = is_bit & (node >= 0)
        is_seen = tl.load(seen + token * seen_stride + node, mask=is_node, other=1) != 0
        if HAS_WINDOW:
            depth = tl.load(depths + token, mask=is_bit, other=0)
            of_key = tl.load(depths + start + node, mask=is_node, other=0)
            is_seen = is_seen & (depth - tl.where(is_node, of_key, node) < window)
        byte += (is_seen & is_bit).to(tl.int32) << bit
    is_byte = places * 8 < query_len * num_keys
    tl.store(bits + tl.load(indptr + row) + places, byte.to(tl.uint8), mask=is_byte)
