"""Reads from a request what the router decides by: the prompt, the session, and ids of state.

The body is decoded only as far as needed: the prompt stays JSON text, whose beginning is the same
for the next turn of a conversation. A body that is not valid JSON has no facts; the replica answers
for it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from aserve.errors import UNDECODABLE

TOKEN_BYTES = 4  # bytes of a prompt per token, as far as a router can know
DEFAULT_OUTPUT = 256  # tokens that a request without a limit is charged for in advance
MAX_OUTPUT = 1 << 30  # JSON has integers of any length


class _Body(msgspec.Struct):
    """The fields of OpenAI's, Anthropic's, SGLang's and Ollama's bodies that matter here."""

    model: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    text: msgspec.Raw = msgspec.Raw()
    input_ids: msgspec.Raw = msgspec.Raw()
    user: Any = None
    prompt_cache_key: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    previous_response_id: Any = None
    conversation: Any = None
    input_file_id: Any = None
    rid: Any = None
    request_id: Any = None
    id: Any = None


class RequestFacts(msgspec.Struct, frozen=True):
    """`ids` name state that one replica has. The numbers of tokens are estimates."""

    prompt: bytes = b""
    session: str = ""
    ids: tuple[str, ...] = ()
    num_prompt_tokens: int = 0
    max_output_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.max_output_tokens


NO_FACTS = RequestFacts()


def facts_of(body: bytes) -> RequestFacts:
    try:
        read = msgspec.json.decode(body, type=_Body)
    except UNDECODABLE:
        return NO_FACTS
    parts = (
        *(read.model, read.tools, read.system, read.instructions, read.messages),
        *(read.prompt, read.input, read.text, read.input_ids),
    )
    prompt = b"\0".join(bytes(part) for part in parts if part)
    conversation = read.conversation
    if isinstance(conversation, dict):
        conversation = conversation.get("id")
    named = (
        *(read.previous_response_id, conversation, read.input_file_id),
        *(read.rid, read.request_id, read.id),
    )
    limits = (read.max_completion_tokens, read.max_output_tokens, read.max_tokens)
    output = next((each for each in limits if isinstance(each, int)), DEFAULT_OUTPUT)
    return RequestFacts(
        prompt=prompt,
        session=next((str(key) for key in (read.prompt_cache_key, read.user) if key), ""),
        ids=tuple(each for each in named if isinstance(each, str) and each),
        num_prompt_tokens=len(prompt) // TOKEN_BYTES,
        max_output_tokens=min(max(0, output), MAX_OUTPUT),
    )
