"""POST /v1/responses/compact: shortens a conversation to the user's messages and a summary.

The model writes the summary. A client sends the items back as the input of its next response. As in
OpenAI's API the summary is opaque, in `encrypted_content`; here it is encoded, not encrypted.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from aiohttp import web

from aserve.http.errors import RequestFailed
from aserve.http.responses.body import InputItem, ResponseBody
from aserve.http.responses.call import response_call
from aserve.http.responses.conversation import (
    ClientItem,
    Compaction,
    Item,
    Message,
    item_for_client,
)
from aserve.http.responses.handlers import responses_of, send_record
from aserve.http.responses.records import (
    OutputMessage,
    ResponseObject,
    ResponseUsage,
)
from aserve.http.route import post
from aserve.http.state import HttpContext, origin_of

MAX_SUMMARY_TOKENS = 1024
ASKED = (
    "Summarize our conversation so far, so that it can go on from your summary alone. Keep facts, "
    "names, numbers, decisions and open questions. Answer with the summary only."
)


class CompactBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    input: str | list[InputItem] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None


class CompactedResponse(msgspec.Struct, frozen=True):
    id: str
    created_at: int  # seconds since 1970
    output: list[ClientItem]
    usage: ResponseUsage | None
    object: Literal["response.compaction"] = "response.compaction"


async def compact(
    request: web.Request, context: HttpContext, body: CompactBody
) -> web.StreamResponse:
    """Returns the user's messages and a summary of the whole conversation."""
    context_len = context.state.max_model_len or 4 * MAX_SUMMARY_TOKENS
    given = body.input or []
    turns = [InputItem(role="user", content=given)] if isinstance(given, str) else given
    asked = ResponseBody(
        model=body.model,
        input=[*turns, InputItem(role="user", content=ASKED)],
        instructions=body.instructions,
        previous_response_id=body.previous_response_id,
        store=False,
        temperature=0.0,
        max_output_tokens=min(MAX_SUMMARY_TOKENS, context_len // 4),
        truncation="auto",
    )
    responses = responses_of(request)
    call = response_call(asked, origin_of(request, context), responses)
    with responses.running(call) as live:
        async for _ in live.events():
            pass
    if live.error is not None:
        raise RequestFailed(live.error)
    kept: list[Item] = [
        item for item in call.items[:-1] if isinstance(item, Message) and item.role == "user"
    ]
    stem = call.response.id.removeprefix("resp_")
    summary = Compaction(f"cmp_{stem}", (_text_of(live.response),))
    compacted = CompactedResponse(
        call.response.id,
        call.response.created_at,
        [item_for_client(item) for item in [*kept, summary]],
        live.response.usage,
    )
    return await send_record(request, compacted, context)


def _text_of(response: ResponseObject) -> str:
    messages = [item for item in response.output if isinstance(item, OutputMessage)]
    return "".join(part.text for message in messages for part in message.content)


ROUTES = (post("/v1/responses/compact", CompactBody, compact),)
