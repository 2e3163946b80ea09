"""The order of the tiles of a matrix product, in which neighbouring programs share weights.

It is Triton's grouped order (its matrix multiplication tutorial): tiles of up to GROUP_M blocks of
tokens read the same weights one after the other, so these are in the L2 cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

GROUP_M = tl.constexpr(8)


@triton.jit
def tile_at(tile: int, num_token_blocks: int, NUM_OUTPUT_BLOCKS: tl.constexpr) -> tuple[int, int]:
    """Returns the number of a tile's block of tokens, and that of its block of outputs."""
    per_group: tl.constexpr = GROUP_M * NUM_OUTPUT_BLOCKS
    group = tile // per_group
    group_size = tl.minimum(num_token_blocks - group * GROUP_M, GROUP_M)
    in_group = tile % per_group
    return group * GROUP_M + in_group % group_size, in_group // group_size
