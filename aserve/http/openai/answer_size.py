"""Bounds the size of an answer by its number of log-probabilities, before any work is done.

The counts are upper bounds, because texts are not encoded yet: a text has at most as many tokens as
bytes, and no prompt is longer than the context. On request, padding hides the sizes of events.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from aserve.errors import InvalidRequest
from aserve.messages.requests import ChatPrompt, GenerateRequest, Prompt, TextPrompt, TokenPrompt

OBFUSCATION_BYTES = 64
TEMPLATE_TOKENS = 4096  # a generous bound on the tokens that a chat template adds


@dataclass(frozen=True, slots=True)
class AnswerLimits:
    """The limits that apply to a call. `max_model_len` and `max_new_tokens`, the default of
    max_tokens, are known once a model is loaded.
    """

    max_logprobs: int = 1 << 20
    max_model_len: int | None = None
    max_new_tokens: int | None = None


NO_MODEL = AnswerLimits()


def check_answer_size(
    requests: Sequence[GenerateRequest], limits: AnswerLimits, *, is_whole: bool
) -> None:
    """Raises InvalidRequest if the answer could have too many log-probabilities.

    `is_whole` means that the answer holds the outputs of all requests at once. Streamed outputs are
    not counted, but prompts always are: their log-probabilities come all at once.
    """
    for_prompts = sum(num_prompt_logprobs(request, limits) for request in requests)
    for_outputs = sum(num_output_logprobs(request, limits) for request in requests if is_whole)
    total = for_prompts + for_outputs
    if total <= limits.max_logprobs:
        return
    sampling = requests[0].sampling
    advice = "Ask for fewer alternatives, prompts, choices or tokens"
    raise InvalidRequest(
        f"The answer could have {total} log-probabilities: {len(requests)} prompts x {sampling.n} "
        f"choices, {for_prompts} for the tokens of prompts and {for_outputs} for those of outputs; "
        f"this server allows {limits.max_logprobs} in one answer. {advice}.",
        param="prompt_logprobs" if for_prompts > for_outputs else "logprobs",
        code="answer_too_large",
    )


def num_prompt_logprobs(request: GenerateRequest, limits: AnswerLimits) -> int:
    sampling = request.sampling
    if sampling.prompt_logprobs is None:
        return 0
    most = [max_prompt_len(request.prompt)]
    if limits.max_model_len is not None:
        most.append(limits.max_model_len)
    if (request.truncate_prompt_tokens or 0) > 0:
        most.append(request.truncate_prompt_tokens or 0)
    return sampling.n * min(most) * (1 + sampling.prompt_logprobs)


def num_output_logprobs(request: GenerateRequest, limits: AnswerLimits) -> int:
    sampling = request.sampling
    if sampling.logprobs is None:
        return 0
    lengths = (sampling.max_tokens, limits.max_new_tokens)
    most = [length for length in lengths if length is not None][:1]
    if limits.max_model_len is not None:
        most.append(limits.max_model_len)
    return sampling.n * min(most, default=0) * (1 + sampling.logprobs)


def max_prompt_len(prompt: Prompt) -> int:
    match prompt:
        case TextPrompt():
            return len(prompt.text.encode("utf-8", "surrogatepass"))
        case TokenPrompt():
            return len(prompt.token_ids)
        case ChatPrompt():
            return len(prompt.messages) + len(prompt.tools or b"") + TEMPLATE_TOKENS


def obfuscated(event: bytes) -> bytes:
    """Pads a JSON object with random letters to a multiple of OBFUSCATION_BYTES, so that its size
    tells less of its text. The field's name is OpenAI's.
    """
    start, end = event[:-1] + b',"obfuscation":"', b'"}'
    missing = -(len(start) + len(end)) % OBFUSCATION_BYTES
    return start + secrets.token_hex(missing // 2 + 1)[:missing].encode() + end
