"""Checks a request before the scheduler's state machine sees it, and bounds the tokenizer's queue.

WHY: a decision that raises leaves the state half changed, so it ends the engine. These checks find
whatever could raise because of one request, while nothing has changed yet.
"""

from __future__ import annotations

from dataclasses import dataclass

from aserve.errors import BugError, CapacityError, ExpectedWait, InvalidRequest, QueueFull
from aserve.messages.base import MAX_INT64, array_i32
from aserve.messages.executor import EngineSpec
from aserve.messages.requests import (
    AdmitRequest,
    ChatPrompt,
    Prompt,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
)

# Sampling parameters that depend on the tokens before a token, or say something of each token.
TOKEN_BY_TOKEN = (
    *("grammar", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
    *("min_tokens", "bad_words", "allowed_token_ids", "logprobs", "prompt_logprobs"),
)
RETRY_AFTER_S = 1.0


def check_request(
    request: AdmitRequest, spec: EngineSpec, *, has_masks: bool, has_transfers: bool = False
) -> None:
    """Raises BugError for a request that the tokenizer actor must never send."""
    sampling = request.sampling
    max_tokens = sampling.max_tokens
    prompt_len = _check_ids(request.prompt_ids, spec, what="prompt")
    if max_tokens is None or max_tokens < 0:
        raise BugError(f"max_tokens is {max_tokens}: it was not resolved")
    if not 0 < prompt_len <= spec.max_model_len - max_tokens:
        raise BugError(
            f"a prompt of {prompt_len} tokens and max_tokens {max_tokens} do not fit into "
            f"max_model_len {spec.max_model_len}"
        )
    if sampling.n < 1 or not -MAX_INT64 - 1 <= sampling.seed <= MAX_INT64:
        raise BugError(f"n is {sampling.n} and the seed is {sampling.seed}, which is out of range")
    if sampling.grammar is not None and not has_masks:
        raise BugError("a request has a grammar, but this engine has no mask actor")
    if not spec.decode.root_len:
        _check_blocks(request)
    if request.awaits_kv and (not has_transfers or not max_tokens):
        raise BugError("a request awaits KV, but has max_tokens 0 or an engine without transfers")
    if request.outputs and len(request.outputs) != sampling.n:
        raise BugError(f"a request of {sampling.n} children has {len(request.outputs)} outputs")
    for outputs in request.outputs:
        num_outputs = _check_ids(outputs, spec, what="outputs")
        if num_outputs > max_tokens:
            raise BugError(f"{num_outputs} output tokens are more than max_tokens {max_tokens}")


def _check_blocks(request: AdmitRequest) -> None:
    """Raises InvalidRequest for what goes token by token, and so not with a model that fills blocks
    of tokens in any order."""
    sampling, plain = request.sampling, SamplingParams(seed=0)
    wanted = [name for name in TOKEN_BY_TOKEN if getattr(sampling, name) != getattr(plain, name)]
    wanted += ["embeddings"] * request.embeds + ["KV of another engine"] * request.awaits_kv
    if wanted:
        raise InvalidRequest(
            "This is a diffusion language model, which fills blocks of tokens in any order. It "
            f"does not support {', '.join(wanted)}.",
            param=wanted[0],
            code="unsupported_value",
        )


def _check_ids(data: bytes, spec: EngineSpec, *, what: str) -> int:
    """Returns the number of ids. Raises BugError if one is outside the vocabulary."""
    ids = array_i32(data)
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= spec.vocab_size):
        raise BugError(f"the {what} has token ids outside 0..{spec.vocab_size - 1}")
    return len(ids)


def has_pictures(prompt: Prompt) -> bool:
    """Such a prompt is never short: a file of few bytes may have millions of pixels."""
    return isinstance(prompt, ChatPrompt) and bool(prompt.pictures)


@dataclass(frozen=True, slots=True)
class TokenizeQueue:
    """The bound on prompts that wait for a thread, or are in one."""

    max_requests: int = 512
    max_chars: int = 64 << 20  # characters and token ids of all their prompts

    def check(self, size: int, *, num_waiting: int, num_chars: int) -> None:
        """Raises QueueFull. A prompt that comes alone may have any size here."""
        if num_waiting >= self.max_requests:
            raise QueueFull(
                f"{num_waiting} prompts wait to be tokenized, and at most {self.max_requests} may. "
                "Try again later.",
                retry_after_s=RETRY_AFTER_S,
                wait=ExpectedWait(num_waiting + 1, None),
            )
        if num_waiting and num_chars + size > self.max_chars:
            raise QueueFull(
                f"Prompts of {num_chars} characters wait to be tokenized, this one has {size}, and "
                f"at most {self.max_chars} may wait. Try again later.",
                retry_after_s=RETRY_AFTER_S,
                wait=ExpectedWait(num_waiting + 1, None),
            )


def too_early() -> CapacityError:
    """The answer to an Amend of a request that has not reached the scheduler."""
    return CapacityError(
        "The request is still being prepared: its prompt is tokenized, or its grammar compiled. "
        "Try again later.",
        code="request_not_queued",
        retry_after_s=RETRY_AFTER_S,
    )


def prompt_size(prompt: Prompt) -> int:
    match prompt:
        case TextPrompt():
            return len(prompt.text)
        case TokenPrompt():
            return len(prompt.token_ids)
        case ChatPrompt():
            parts = (prompt.messages, prompt.tools, prompt.variables)
            num_bytes = sum(len(part or b"") for part in parts)
            return num_bytes + sum(len(picture.url) for picture in prompt.pictures)
