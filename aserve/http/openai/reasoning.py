"""The limit of reasoning tokens, under the names that clients of other servers know."""

from __future__ import annotations

from collections.abc import Mapping

from aserve.errors import InvalidRequest
from aserve.http.openai.conversation import ReasoningOptions
from aserve.http.openai.limits import Range, check_within
from aserve.http.openai.schema import Effort
from aserve.messages.base import MAX_INT32
from aserve.messages.requests import ReasoningParams
from aserve.parsers.registry import ParserNames

# The names of vLLM, SGLang, llama.cpp and Qwen's API. -1 is no limit, and 0 switches reasoning off.
BUDGETS = ("thinking_token_budget", "max_thinking_tokens", "reasoning_budget", "thinking_budget")
RANGE = Range(-1, MAX_INT32)


def reasoning_budget(fields: Mapping[str, int | None]) -> int | None:
    """Returns the one value that the fields of these names give, or None for no limit."""
    given = {name: value for name, value in fields.items() if value is not None}
    for name, value in given.items():
        check_within(value, RANGE, param=name)
    if len(set(given.values())) > 1:
        (first, one), *_, (last, other) = given.items()
        message = f"Invalid '{last}': it is {other}, but '{first}' is {one}. Send only one of them."
        raise InvalidRequest(message, param=last, code="invalid_value")
    budget = next(iter(given.values()), -1)
    return None if budget < 0 else budget


def reasoning_limit(
    budget: int | None, *, is_enabled: bool | None = None, effort: Effort | None = None
) -> int | None:
    """Returns the limit of reasoning tokens. A request that switches reasoning off has the limit 0,
    because the model's chat template may not know the switch.
    """
    is_off = effort == "none" if is_enabled is None else not is_enabled
    return 0 if is_off else budget


def reasoning_params(
    options: ReasoningOptions, parsers: ParserNames, *, tools: str | None, may_reason: bool
) -> ReasoningParams | None:
    """Returns the parameters of an output that may begin with reasoning. Raises if that has a limit
    and it is not known how the model ends it.
    """
    if options.max_tokens and parsers.reasoning is None:
        raise InvalidRequest(
            "Unsupported limit of reasoning tokens: no reasoning parser fits this server's model, "
            "so the end of its reasoning is not known; see --reasoning-parser.",
            param="thinking_token_budget",
            code="unsupported_value",
        )
    if parsers.reasoning is None or not may_reason:
        return None
    return ReasoningParams(parsers.reasoning, tools, options.max_tokens)
