"""Request bodies that cost a server much more than they cost their sender.

Each body repeats an item up to the requested size. A server must refuse all of them quickly and
stay responsive for other clients.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from dataclasses import dataclass

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"

PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    "gzip": lambda data: gzip.compress(data),
    "deflate": lambda data: zlib.compress(data),
}


@dataclass(frozen=True, slots=True)
class HostileBody:
    """A body of repeated items. `status` and `code` are the expected error for a body of at least a
    few hundred kilobytes.
    """

    name: str
    path: str
    head: str
    item: str
    tail: str
    status: int = 400
    code: str = "body_too_complex"
    encoding: str = ""

    @property
    def headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        if self.encoding:
            headers["Content-Encoding"] = self.encoding
        return headers

    def data(self, size: int) -> bytes:
        """Returns about `size` bytes of JSON, encoded for sending."""
        head, item, tail = self.head.encode(), self.item.encode(), self.tail.encode()
        count = (size - len(head) - len(tail)) // len(item)
        plain = head + item * count + tail
        return PACK[self.encoding](plain)


MESSAGE = '{"messages":[{"role":"user","content":"a"}],'
TOO_LARGE = "request_too_large"
TOO_LONG = "context_length_exceeded"

BODIES = (
    HostileBody("lists as prompt", COMPLETIONS, '{"prompt":[', "[],", "[]]}"),
    HostileBody("ids as prompt", COMPLETIONS, '{"prompt":[', "12,", "1]}"),
    HostileBody("texts as prompt", COMPLETIONS, '{"prompt":[', '"",', '""]}'),
    HostileBody("unknown fields", COMPLETIONS, '{"prompt":"a",', '"b1":1,', '"c":1}'),
    HostileBody(
        "tool calls",
        CHAT,
        '{"messages":[{"role":"assistant","tool_calls":[',
        '{"function":{"name":"a"}},',
        '{"function":{"name":"a"}}]}]}',
    ),
    HostileBody("messages", CHAT, '{"messages":[', '{"role":"user"},', '{"role":"user"}]}'),
    HostileBody(
        "template arguments", CHAT, f'{MESSAGE}"chat_template_kwargs":{{"a":[', "1,", "1]}}"
    ),
    HostileBody("tools", CHAT, f'{MESSAGE}"tools":[', '{"type":"function"},', "1]}"),
    HostileBody("input items", RESPONSES, '{"input":[', '{"role":"user"},', '{"role":"user"}]}'),
    HostileBody(
        "enum of lists",
        COMPLETIONS,
        '{"prompt":"a","structured_outputs":{"json":{"enum":[',
        "[],",
        "[]]}}}",
    ),
    HostileBody("members", COMPLETIONS, '{"prompt":"a","logit_bias":{', '"1":1,', '"2":1}}'),
    HostileBody(
        "exponents", COMPLETIONS, '{"prompt":"a","user":[', "1.7976931348623157e308,", "1]}"
    ),
    HostileBody("depth", COMPLETIONS, '{"prompt":"a","user":', "[", ""),
    HostileBody("long text", COMPLETIONS, '{"prompt":"', "Once upon a time, ", '"}', code=TOO_LONG),
    HostileBody("escaped text", COMPLETIONS, '{"prompt":"', "\\n", '"}'),
    HostileBody("wide text", COMPLETIONS, '{"prompt":"', "🚀", '"}', code=TOO_LONG),
    HostileBody(
        "long message", CHAT, '{"messages":[{"role":"user","content":"', "a ", '"}]}', code=TOO_LONG
    ),
    HostileBody("gzip of lists", COMPLETIONS, '{"prompt":[', "[],", "[]]}", 413, TOO_LARGE, "gzip"),
    HostileBody("gzip of text", COMPLETIONS, '{"prompt":"', "a b c ", '"}', 413, TOO_LARGE, "gzip"),
    HostileBody(
        "deflate of ids", COMPLETIONS, '{"prompt":[', "1,", "1]}", 413, TOO_LARGE, "deflate"
    ),
)
