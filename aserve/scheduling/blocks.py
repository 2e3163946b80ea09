"""Spans and prefixes that are not cut anywhere: those of prompts that are not causal, those of
pictures whose tokens see each other, and those of decode modes whose KV depends on whole blocks
(`DecodeCaps.block_len`). Nothing here changes state.

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
    causal is not cut into chunks, and neither a block nor a picture that sees itself is cut.
    """
    if sequence.is_causal:
        in_block = min(sequence.remaining, sequence.block_len)
        return max(1, in_block, _left_of_picture(sequence, sequence.scheduled_len))
    return max(1, sequence.prompt_len - sequence.scheduled_len)


def min_query_lens(state: SchedulerState, rows: Column) -> Column:
    """Returns `min_query_len` of each row, where a prefill may have less left."""
    table = state.table
    left: Column = table.whole_len[rows] - table.scheduled_len[rows]
    lens = np.maximum(left, state.spec.decode.block_len)
    if state.has_uncut:
        for index in np.flatnonzero(table.remaining[rows] > 1):
            lens[index] = min_query_len(table.sequences[rows[index]])
    return lens


def uncut_pictures(state: SchedulerState, rows: Column, query_lens: Column) -> Column:
    """Returns the spans of a step, where a chunk that would end in a picture that sees itself ends
    before it.
    """
    if not state.has_uncut:
        return query_lens
    for index in np.flatnonzero(query_lens < state.table.remaining[rows]):
        sequence: Sequence = state.table.sequences[rows[index]]
        end = sequence.scheduled_len + int(query_lens[index])
        for picture in sequence.pictures:
            if picture.sees_itself and picture.start < end < picture.end:
                query_lens[index] = max(0, picture.start - sequence.scheduled_len)
    return query_lens


def _left_of_picture(sequence: Sequence, position: int) -> int:
    """Returns the tokens from a position to the end of the picture around it that sees itself; 0:
    there is none.
    """
    ends = [p.end for p in sequence.pictures if p.sees_itself and p.start <= position < p.end]
    return max(ends, default=position) - position


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
