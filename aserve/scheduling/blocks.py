"""Spans and prefixes that are not cut anywhere: those of prompts that are not causal, and those of
decode modes whose KV depends on whole blocks (`DecodeCaps.block_len`). Nothing here changes state.

All blocks are cut from position 0 on, so the prompt's tail shares a block with the first outputs.
A prompt's chunks, and the prefixes that the cache gives a sequence, end where a block ends. The KV
of a prompt's tail is provisional: decoding the block computes it anew.
"""

from __future__ import annotations

import numpy as np

from aserve.cache.page_keys import PageKeys
from aserve.cache.prefix_tree import Prefix
from aserve.messages.executor import DecodeCaps, EngineSpec
from aserve.scheduling.request import Sequence
from aserve.scheduling.rows import Column
from aserve.scheduling.state import SchedulerState
from aserve.scheduling.token_log import whole_blocks


def min_query_len(sequence: Sequence) -> int:
    """Returns how many tokens the row must compute in its next step at least: a prompt that is not
    causal is not cut into chunks, and a block is not cut.
    """
    if sequence.is_causal:
        return max(1, min(sequence.remaining, sequence.block_len))
    return max(1, sequence.prompt_len - sequence.scheduled_len)


def min_query_lens(state: SchedulerState, rows: Column) -> Column:
    """Returns `min_query_len` of each row, where a prefill may have less left."""
    left: Column = state.table.whole_len[rows] - state.table.scheduled_len[rows]
    return np.maximum(left, state.spec.decode.block_len)


def uncut_blocks(query_lens: Column, remaining: Column, starts: Column, caps: DecodeCaps) -> Column:
    """Returns the spans of a step, where a chunk that does not reach the end of its prompt ends
    with a block.
    """
    if caps.block_len == 1:
        return query_lens
    whole = (starts + query_lens) // caps.block_len * caps.block_len - starts
    chunks: Column = np.where(query_lens < remaining, whole.clip(min=0), query_lens)
    return chunks


def cached_prefix(
    state: SchedulerState, sequence: Sequence, keys: PageKeys, *, rank: int
) -> tuple[Prefix, int]:
    """Returns the longest prefix cached on the rank that the sequence can use, and the most pages
    that it might have had.
    """
    cache = state.cache.ranks[rank]
    most = whole_pages(min(sequence.max_cached_len // state.spec.page_size, len(keys)), state.spec)
    prefix = cache.match(keys, most=most)
    num_pages = whole_pages(prefix.num_pages, state.spec)
    if num_pages < prefix.num_pages:
        prefix = cache.match(keys, most=num_pages)
    return prefix, most


def whole_pages(num_pages: int, spec: EngineSpec) -> int:
    """Returns the most of these pages that end with a block. One of page size and block length
    divides the other.
    """
    if spec.decode.block_len <= spec.page_size:
        return num_pages
    return whole_blocks(num_pages, spec.decode.block_len // spec.page_size)
