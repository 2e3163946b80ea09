"""Log-probabilities of the device as the records that clients read, with the tokens spelled.

Must not know requests or whose tokens they are.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from aserve.messages import TopLogprob, array_f32, array_i32
from aserve.text.tokenizer import TextTokenizer

IMPOSSIBLE = -9999.0  # the log-probability of a banned token, which JSON cannot say; as OpenAI does


def shown(token_bytes: bytes) -> str:
    return token_bytes.decode("utf-8", "replace")


def alternatives(
    top_ids: bytes, top_logprobs: bytes, *, num_tokens: int, num_top: int, tokenizer: TextTokenizer
) -> Iterator[tuple[TopLogprob, ...]]:
    """int32 and float32 [num_tokens, num_top or more], best first -> one tuple per token."""
    ids = array_i32(top_ids).reshape(num_tokens, -1)[:, :num_top].tolist()
    finite = np.maximum(array_f32(top_logprobs).reshape(num_tokens, -1)[:, :num_top], IMPOSSIBLE)
    for own_ids, own_logprobs in zip(ids, finite.tolist(), strict=True):
        yield tuple(
            alternative(token_id, logprob, tokenizer)
            for token_id, logprob in zip(own_ids, own_logprobs, strict=True)
        )


def alternative(token_id: int, logprob: float, tokenizer: TextTokenizer) -> TopLogprob:
    token_bytes = tokenizer.token_bytes(token_id)
    return TopLogprob(token_id, shown(token_bytes), token_bytes, logprob)
