"""Token ids in a request's sampling parameters: which end an output, and whether all are valid."""

from __future__ import annotations

from collections.abc import Sequence

from aserve.errors import InvalidRequest
from aserve.messages.requests import SamplingParams
from aserve.text.lengths import PromptLimits
from aserve.text.tokenizer import TextTokenizer


def end_ids(tokenizer: TextTokenizer, sampling: SamplingParams) -> tuple[int, ...]:
    """Returns the ids that end an output. Both text actors call this, so that they agree.

    With a grammar `ignore_eos` has no effect: eos must end the output when the grammar is complete.
    """
    ignores_eos = sampling.ignore_eos and sampling.grammar is None
    eos_ids = () if ignores_eos else tokenizer.eos_ids
    return tuple(dict.fromkeys((*eos_ids, *sampling.stop_token_ids)))


def check_sampling_ids(sampling: SamplingParams, limits: PromptLimits) -> None:
    biased = [token_id for token_id, _ in sampling.logit_bias]
    check_range(biased, limits.vocab_size, param="logit_bias")
    check_range(sampling.stop_token_ids, limits.vocab_size, param="stop_token_ids")
    check_range(sampling.allowed_token_ids, limits.vocab_size, param="allowed_token_ids")


def check_can_sample(
    sampling: SamplingParams,
    ends: tuple[int, ...],
    bad_words: tuple[tuple[int, ...], ...],
    limits: PromptLimits,
) -> None:
    """Raises if bad words, min_tokens and allowed_token_ids could leave no token to sample."""
    banned = {word[-1] for word in bad_words}
    if sampling.min_tokens:
        banned.update(ends)
    allowed = sampling.allowed_token_ids
    num_left = len({*allowed} - banned) if allowed else limits.vocab_size - len(banned)
    if num_left < 1:
        raise InvalidRequest(
            "nothing could be sampled: all allowed tokens are bad words, or would end the output "
            "before min_tokens",
            param="bad_words" if bad_words else "allowed_token_ids",
            code="nothing_allowed",
        )


def check_range(ids: Sequence[int], vocab_size: int, *, param: str) -> None:
    wrong = next((token_id for token_id in ids if not 0 <= token_id < vocab_size), None)
    if wrong is not None:
        raise InvalidRequest(
            f"token id {wrong} is out of range: this model's ids are 0 to {vocab_size - 1}",
            param=param,
            code="token_id_out_of_range",
        )
