"""What a client may give as a prompt: one text, texts, one list of ids, or lists of ids.

Must not know which endpoint's field it is.
"""

from __future__ import annotations

from collections.abc import Sequence

from aserve.errors import InvalidRequest
from aserve.http.openai.schema import TextsOrIds
from aserve.messages import Prompt, TextPrompt, TokenPrompt


def prompts_of(given: TextsOrIds | None, *, param: str, with_special: bool = True) -> list[Prompt]:
    if given is None:
        raise InvalidRequest(
            f"Missing required parameter: '{param}'.",
            param=param,
            code="missing_required_parameter",
        )
    items = [given] if isinstance(given, str) else given
    if not items:
        raise InvalidRequest(
            f"Invalid '{param}': the list is empty.", param=param, code="empty_array"
        )
    kinds = set(map(type, items))  # PERF: a prompt may have hundreds of thousands of ids
    if len(kinds) > 1:
        raise InvalidRequest(
            f"Invalid '{param}': a list holds texts, token ids or lists of token ids, "
            "not a mixture.",
            param=param,
            code="invalid_type",
        )
    if kinds == {int}:
        return [token_prompt([item for item in items if isinstance(item, int)])]
    return [
        TextPrompt(item, with_special) if isinstance(item, str) else token_prompt(item)
        for item in items
        if not isinstance(item, int)
    ]


def token_prompt(token_ids: Sequence[int]) -> TokenPrompt:
    return TokenPrompt(tuple(token_ids))
