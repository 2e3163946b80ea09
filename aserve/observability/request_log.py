"""Logs a line when a request comes and one when it ends, with --log-requests.

Up to level 1 a line has nothing that a client wrote: no prompt, output, stop string, bad word or
grammar. Levels 2 and 3 have prompts and outputs, escaped, so that no text begins a line of its own.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import assert_never

from aserve.config import ServerOptions
from aserve.messages.base import num_values
from aserve.messages.output import OutputChunk
from aserve.messages.requests import ChatPrompt, GenerateRequest, Prompt, TextPrompt, TokenPrompt
from aserve.observability.latency import operation_of

PARAMS_LEVEL, TEXTS_LEVEL, WHOLE_LEVEL = 1, 2, 3
SHOWN_CHARS = 2048  # of each text at TEXTS_LEVEL
NUMBERS = (
    *("seed", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "max_tokens", "min_tokens", "ignore_eos", "logprobs"),
    *("prompt_logprobs", "echo", "n"),
)

RECEIVED = "request received id=%s operation=%s client=%s params=%s"
RECEIVED_TEXT = RECEIVED + " prompt=%r"
ENDED = (
    "request ended id=%s outcome=%s prompt_tokens=%s cached_tokens=%s completion_tokens=%s "
    "ttft_ms=%s e2e_ms=%s"
)
ENDED_TEXTS = ENDED + " outputs=%r"

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Open:
    began_s: float
    first_s: float | None = None
    num_tokens: int = 0
    reasons: dict[int, str] = field(default_factory=dict)  # by child
    texts: dict[int, str] = field(default_factory=dict)  # by child, from TEXTS_LEVEL on


class RequestLog:
    """`is_on` and `level` are those of the options log_requests and log_requests_level. They may
    change at any time: a request that came without a line ends without one.
    """

    def __init__(
        self,
        level: int = PARAMS_LEVEL,
        *,
        is_on: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.is_on, self.level = is_on, level
        self._clock = clock
        self._open: dict[str, _Open] = {}

    def received(self, request: GenerateRequest) -> None:
        if not self.is_on:
            return
        self._open[request.request_id] = _Open(self._clock())
        details: dict[str, object] = {"priority": request.priority, "lora_slot": request.lora_slot}
        if self.level >= PARAMS_LEVEL:
            details |= _params(request)
        values = (request.request_id, operation_of(request), request.client, json.dumps(details))
        if self._shows_texts:
            logger.info(RECEIVED_TEXT, *values, self._shown(_text(request.prompt)))
        else:
            logger.info(RECEIVED, *values)

    def delivered(self, chunk: OutputChunk) -> None:
        known = self._open.get(chunk.request_id)
        if known is None:
            return
        if known.first_s is None and chunk.token_ids:
            known.first_s = self._clock()
        known.num_tokens += num_values(chunk.token_ids)
        if self._shows_texts:
            known.texts[chunk.child] = known.texts.get(chunk.child, "") + chunk.text
        if chunk.finish_reason is not None:
            known.reasons[chunk.child] = chunk.finish_reason
        if chunk.is_last:
            outcome = ",".join(known.reasons[child] for child in sorted(known.reasons))
            self._end(chunk.request_id, chunk.error.code if chunk.error else outcome, chunk)

    def all_ended(self, reason: str) -> None:
        for request_id in list(self._open):
            self._end(request_id, reason, None)

    @property
    def _shows_texts(self) -> bool:
        return self.level >= TEXTS_LEVEL

    def _end(self, request_id: str, outcome: str, last: OutputChunk | None) -> None:
        known = self._open.pop(request_id)
        ttft_ms = None if known.first_s is None else round(1000 * (known.first_s - known.began_s))
        usage = (last.usage.prompt_tokens, last.usage.cached_tokens) if last else (None, None)
        times = (ttft_ms, round(1000 * (self._clock() - known.began_s)))
        values = (request_id, outcome, *usage, known.num_tokens, *times)
        if self._shows_texts:
            texts = [self._shown(known.texts[child]) for child in sorted(known.texts)]
            logger.info(ENDED_TEXTS, *values, texts)
        else:
            logger.info(ENDED, *values)

    def _shown(self, text: str) -> str:
        return text if self.level >= WHOLE_LEVEL else text[:SHOWN_CHARS]


def request_log_of(options: ServerOptions) -> RequestLog:
    return RequestLog(options.log_requests_level, is_on=options.log_requests)


def _params(request: GenerateRequest) -> dict[str, object]:
    """Returns the parameters that are numbers, and the kind of the grammar."""
    sampling = request.sampling
    params: dict[str, object] = {name: getattr(sampling, name) for name in NUMBERS}
    if sampling.grammar is not None:
        params["grammar"] = sampling.grammar.kind
    return params


def _text(prompt: Prompt) -> str:
    """Returns the prompt as the client gave it: of a chat, the JSON of its messages."""
    match prompt:
        case TextPrompt():
            return prompt.text
        case TokenPrompt():
            return str(list(prompt.token_ids))
        case ChatPrompt():
            return prompt.messages.decode(errors="replace")
        case _:
            assert_never(prompt)
