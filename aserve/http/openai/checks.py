"""Checks of single fields. Each raises an error or does nothing."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from aserve.errors import InvalidRequest, NotFound
from aserve.http.openai.limits import check_limits
from aserve.http.openai.schema import ChatBody, CompletionBody, GenerationBody


def check_body(body: GenerationBody, model_names: tuple[str, ...]) -> None:
    if body.model is not None:
        check_model(body.model, model_names)
    check_limits(body)
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest(
            "The 'stream_options' parameter is only allowed when 'stream' is enabled.",
            param="stream_options",
            code="invalid_value",
        )


def check_model(name: str, served: tuple[str, ...]) -> None:
    """Raises unless a model or an adapter is served as `name`. SGLang's `base:name` is allowed."""
    base, _, adapter = name.partition(":")
    if name not in served and not {base, adapter} <= {*served}:
        raise NotFound(
            f"The model `{name[:200]}` does not exist; this server has {', '.join(served)}.",
            param="model",
            code="model_not_found",
        )


def unsupported(name: str, advice: str) -> InvalidRequest:
    return InvalidRequest(
        f"Unsupported parameter: '{name}'. {advice}", param=name, code="unsupported_parameter"
    )


def check_suffix(body: CompletionBody) -> None:
    if body.suffix:
        raise InvalidRequest(
            "Unsupported value for 'suffix': fill-in-the-middle is not supported.",
            param="suffix",
            code="unsupported_value",
        )


def check_best_of(body: CompletionBody) -> None:
    n = body.n or 1
    best_of = n if body.best_of is None else body.best_of
    if best_of < n:
        raise InvalidRequest(
            f"Invalid 'best_of': {best_of} is less than n, which is {n}.",
            param="best_of",
            code="integer_below_min_value",
        )
    if best_of > n and body.stream:
        raise InvalidRequest(
            f"Invalid 'best_of': the best {n} of {best_of} cannot be streamed, because they are "
            "known only when all have ended.",
            param="best_of",
            code="invalid_value",
        )


def num_logprobs(body: ChatBody) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise InvalidRequest(
            "Invalid 'top_logprobs': it is only allowed when 'logprobs' is true.",
            param="top_logprobs",
            code="invalid_value",
        )
    return None


def check_unsupported(
    body: msgspec.Struct, neutral: Mapping[str, tuple[object, ...]], *, where: str = ""
) -> None:
    """Raises if a field of `neutral` has a value other than None and those that mean no effect."""
    for name, values in neutral.items():
        value = getattr(body, name)
        if value is not None and value not in values:
            raise InvalidRequest(
                f"Unsupported parameter: '{where}{name}'. This server has no such feature, and "
                "leaving it out would change the output.",
                param=f"{where}{name}",
                code="unsupported_parameter",
            )


def check_only_one(given: Mapping[str, object]) -> str | None:
    """Returns the name of the constraint that is given, or None. Raises if there are several."""
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise InvalidRequest(
            f"Only one of {', '.join(given)} can be set; got {' and '.join(names)}.",
            param=names[1],
            code="invalid_value",
        )
    return names[0] if names else None
