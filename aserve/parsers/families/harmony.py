"""gpt-oss: an answer is a sequence of messages in channels (openai/harmony).

    <|channel|>analysis<|message|>Thoughts.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>
    <|start|>assistant<|channel|>final<|message|>The answer.<|return|>

The analysis is reasoning; a message to a recipient is a call; everything else is content. The
prompt ends with `<|start|>assistant`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from aserve.parsers.base import CallSyntax, ReasoningFamily, ToolFamily
from aserve.parsers.calls import CallWriter, read_calls
from aserve.parsers.events import Content, Reasoning, ToolSpec
from aserve.parsers.json_calls import arguments
from aserve.parsers.reader import Markers, Parsing, Reader

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN, END, CALL, RETURN = "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"
TO = " to=functions."  # the role before it belongs to the prompt
ENDS = (END, CALL, RETURN)
HEADER_ENDS = Markers((MESSAGE, *ENDS))
BODY_ENDS = Markers((*ENDS, START, CHANNEL))
RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.:/-]+)")


def parse(reader: Reader, _: Sequence[ToolSpec]) -> Parsing[None]:
    """Reads messages. Text without a header is content."""
    return read_calls(reader, _message, begins=(START, CHANNEL, TO, *ENDS), ends=ENDS)


def _message(reader: Reader, found: str) -> Parsing[None]:
    header = [found]
    end = found if found in ENDS else (yield from reader.until(HEADER_ENDS, header.append))
    if end != MESSAGE:  # a header without a message, or an end without a header
        reader.release()
        return
    recipient = RECIPIENT.search("".join(header))
    if recipient is None:
        reader.release()
        kind = Reasoning if f"{CHANNEL}analysis" in "".join(header) else Content
        end = yield from reader.until(BODY_ENDS, reader.events.to(kind))
    else:
        end = yield from _call(reader, recipient[1])
    if end in (START, CHANNEL):
        reader.unread(end)


def _call(reader: Reader, name: str) -> Parsing[str]:
    call = CallWriter(reader, name)
    yield from reader.skip_space()
    yield from arguments(reader, call)
    call.finish()
    return (yield from reader.expect(*ENDS, START, CHANNEL))


SYNTAX = CallSyntax(
    f"{CHANNEL}commentary{TO}{{name}} {CONSTRAIN}json{MESSAGE}",
    "",
    trigger=f"{CHANNEL}commentary{TO}",
    is_last=True,
)
HARMONY = ToolFamily(
    parse,
    SYNTAX,
    markers=(START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS),
    begins=(),
    has_reasoning=True,
)
GPT_OSS = ReasoningFamily(
    (f"{CHANNEL}analysis{MESSAGE}",),
    (END,),
    before_call=f"{START}assistant",
    before_content=f"{CHANNEL}final{MESSAGE}",
    parsed_by=HARMONY,
)
