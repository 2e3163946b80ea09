"""The bits of draft trees in Triton's interpreter, against plain torch."""

from __future__ import annotations

import pytest
import torch

from aserve_kernels.packed_mask import ListedKeys, PackedMask, packed_mask, packed_mask_ref
from tests.kernels.paged_case import random_trees

PAGE_SIZE = 4


@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize(
    "rows", [((1, 1),), ((5, 5), (1, 17), (3, 12)), ((16, 300), (2, 2), (90, 91))]
)
def test_every_bit_equals_the_reference(
    rows: tuple[tuple[int, int], ...], window: int | None
) -> None:
    """Rows have queries and KV lengths; with a window, their pages before it are not listed."""
    query_lens, lens = torch.tensor(rows).T.contiguous()
    tree = random_trees(query_lens, torch.Generator().manual_seed(0))
    firsts = torch.zeros_like(lens)
    if window is not None:
        firsts = (lens - query_lens - window + 1).clamp(min=0) // PAGE_SIZE
    num_bytes = (query_lens * (lens - firsts * PAGE_SIZE) + 7) // 8
    listed = ListedKeys(
        lens,
        torch.nn.functional.pad(query_lens.cumsum(0), (1, 0)),
        firsts.to(torch.int32),
        PAGE_SIZE,
        int(num_bytes.max()),
    )
    made = []
    for pack in (packed_mask, packed_mask_ref):
        bits = torch.full((int(num_bytes.sum()) + 1,), 170, dtype=torch.uint8)
        made.append(PackedMask(bits, torch.zeros(len(rows) + 1, dtype=torch.int32)))
        pack(tree, listed, window=window, out=made[-1])
    got, expected = made
    assert got.indptr.tolist() == expected.indptr.tolist()
    assert got.bits[:-1].tolist() == expected.bits[:-1].tolist()
