"""Builds the writes of a step into the tables on the device: the parameters of new rows, and new
page-table entries.
"""

from __future__ import annotations

from array import array

import numpy as np

from aserve.messages.base import pack_i32
from aserve.messages.step import PageWrites, RowInit
from aserve.scheduling.request import Sequence
from aserve.scheduling.rows import Column, RowTable

NO_WRITES = PageWrites(rows=b"", columns=b"", pages=b"")


def page_writes(table: RowTable, rows: Column, *, num_groups: int) -> tuple[PageWrites, ...]:
    """Returns the page-table entries of these rows that the device does not have: all of a new row.
    There is one record for each layer group.
    """
    if not len(rows):
        return (NO_WRITES,) * num_groups
    starts = table.written_pages[rows]
    counts = table.num_pages[rows] - starts
    offsets = counts.cumsum() - counts - starts
    columns = pack_i32(np.arange(int(np.add.reduce(counts))) - offsets.repeat(counts))
    packed_rows, first = pack_i32(rows.repeat(counts)), starts.tolist()
    sequences: list[Sequence] = table.sequences[rows].tolist()
    tables = [sequence.allocation.pages for sequence in sequences if sequence.allocation]
    return tuple(
        PageWrites(packed_rows, columns, _new_pages([pages[group] for pages in tables], first))
        for group in range(num_groups)
    )


def _new_pages(tables: list[array[int]], first: list[int]) -> bytes:
    """Returns the pages of each table from its first new one on."""
    return b"".join([pages[start:].tobytes() for pages, start in zip(tables, first, strict=True)])


def row_inits(sequences: list[Sequence]) -> tuple[RowInit, ...]:
    return tuple([row_init(sequence) for sequence in sequences])


def row_init(sequence: Sequence) -> RowInit:
    sampling = sequence.sampling
    return RowInit(
        row=sequence.row,
        seed=sequence.seed,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        prompt_len=sequence.prompt_len,
        min_len=sequence.prompt_len + sequence.min_tokens,
        end_ids=sequence.end_ids,
        logit_bias=sampling.logit_bias,
        num_logprobs=-1 if sampling.logprobs is None else sampling.logprobs,
        raw_logprobs=sampling.raw_logprobs,
        allowed_ids=sampling.allowed_token_ids,
        bad_word_ids=sequence.bad_word_ids,
        num_prompt_logprobs=_num_prompt_logprobs(sequence),
        lora_slot=sequence.lora_slot,
        embeds=sequence.embeds,
        prediction_ids=sequence.prediction_ids,
        pictures=sequence.pictures,
        namespace=sequence.keys.namespace,
    )


def _num_prompt_logprobs(sequence: Sequence) -> int:
    """A sequence that was retracted does not want them again."""
    wanted = sequence.sampling.prompt_logprobs
    return -1 if wanted is None or sequence.num_scored >= sequence.prompt_len else wanted
