"""Builds the writes of a step into the tables on the device: the parameters of new rows, and new
page-table entries.
"""

from __future__ import annotations

import numpy as np

from aserve.messages.step import PageWrites, RowInit
from aserve.scheduling.request import Sequence


def page_writes(sequences: list[Sequence], group: int) -> PageWrites:
    """Returns the page-table entries that the device does not have: all of a new row."""
    rows: list[bytes] = []
    columns: list[bytes] = []
    pages: list[bytes] = []
    for sequence in sequences:
        assert sequence.allocation is not None
        start, stop = sequence.written_pages, sequence.allocation.num_pages
        rows.append(sequence.row.to_bytes(4, "little") * (stop - start))
        pages.append(sequence.allocation.pages[group][start:].tobytes())
        if stop == start + 1:
            columns.append(start.to_bytes(4, "little"))
        else:
            columns.append(np.arange(start, stop, dtype=np.int32).tobytes())
    return PageWrites(rows=b"".join(rows), columns=b"".join(columns), pages=b"".join(pages))


def row_inits(sequences: list[Sequence]) -> tuple[RowInit, ...]:
    return tuple(row_init(sequence) for sequence in sequences if not sequence.written_pages)


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
