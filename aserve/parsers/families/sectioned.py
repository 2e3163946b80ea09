r"""Calls in a section between special tokens: DeepSeek V3, R1 and V3.1, and Kimi K2.

DeepSeek V3    SECTION CALL function SEPARATOR f NEWLINE ```json NEWLINE {"a": 1} NEWLINE ``` END
DeepSeek V3.1  SECTION CALL f SEPARATOR {"a": 1} END
Kimi K2        SECTION CALL functions.f:0 SEPARATOR {"a": 1} END
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aserve.parsers.base import CallSyntax, ToolFamily
from aserve.parsers.calls import CallWriter, name_of_call, read_calls, run
from aserve.parsers.events import ToolSpec
from aserve.parsers.json_calls import arguments
from aserve.parsers.reader import Parsing, Reader

KIMI_ID = re.compile(r"(?:functions\.)?(?P<name>.+?)(?P<number>:\d+)?")
NAME = re.compile(r"[\w.:/-]+")


@dataclass(frozen=True, slots=True)
class SectionTokens:
    begin: str
    call: str
    separator: str  # between the name and the arguments
    call_end: str
    end: str

    @property
    def all(self) -> tuple[str, ...]:
        return self.begin, self.call, self.separator, self.call_end, self.end


@dataclass(frozen=True, slots=True)
class SectionedCalls:
    """A parser of sections. `head` reads what is between the begin of a call and its arguments."""

    tokens: SectionTokens
    head: Callable[[Reader], Parsing[CallWriter]]

    def __call__(self, reader: Reader, _: Sequence[ToolSpec]) -> Parsing[None]:
        tokens = self.tokens
        begins = (tokens.begin, tokens.call, tokens.end)
        return read_calls(reader, self._call, begins=begins, ends=(tokens.call_end,))

    def _call(self, reader: Reader, found: str) -> Parsing[None]:
        """Reads one call. The end of a section, which may be missing, is no content."""
        if found == self.tokens.end:
            reader.release()
            return
        if found == self.tokens.begin:
            yield from reader.expect(self.tokens.call)
        call = yield from self.head(reader)
        yield from reader.skip_space()
        yield from arguments(reader, call)
        call.finish()
        yield from reader.accept("```", space=1)
        yield from reader.expect(self.tokens.call_end)


def _deepseek_head(reader: Reader) -> Parsing[CallWriter]:
    first = yield from name_of_call(reader)
    yield from reader.expect(DEEPSEEK_TOKENS.separator)
    second = yield from run(reader, NAME)  # the name in V3, whose first word is "function"
    yield from reader.accept("```json", space=1)
    return CallWriter(reader, second or first)


def _kimi_head(reader: Reader) -> Parsing[CallWriter]:
    call_id = yield from name_of_call(reader)
    yield from reader.expect(KIMI_TOKENS.separator)
    found = KIMI_ID.fullmatch(call_id)
    assert found is not None, "a name has a character"
    return CallWriter(reader, found["name"], call_id if found["number"] else None)


def _deepseek_token(words: str) -> str:
    """Writes a token with DeepSeek's fullwidth bars and low lines."""
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


DEEPSEEK_TOKENS = SectionTokens(
    begin=_deepseek_token("tool calls begin"),
    call=_deepseek_token("tool call begin"),
    separator=_deepseek_token("tool sep"),
    call_end=_deepseek_token("tool call end"),
    end=_deepseek_token("tool calls end"),
)
KIMI_TOKENS = SectionTokens(
    begin="<|tool_calls_section_begin|>",
    call="<|tool_call_begin|>",
    separator="<|tool_call_argument_begin|>",
    call_end="<|tool_call_end|>",
    end="<|tool_calls_section_end|>",
)


def _deepseek(begin: str, end: str) -> ToolFamily:
    """`begin` and `end` are around the arguments, in the version's form."""
    tokens = DEEPSEEK_TOKENS
    return ToolFamily(
        SectionedCalls(tokens, _deepseek_head),
        CallSyntax(
            f"{tokens.call}{begin}",
            f"{end}{tokens.call_end}",
            trigger=tokens.begin,
            separator="\n",
            section=(tokens.begin, tokens.end),
        ),
        markers=tokens.all,
        begins=(tokens.begin, tokens.call),
    )


DEEPSEEK_V3 = _deepseek(f"function{DEEPSEEK_TOKENS.separator}{{name}}\n```json\n", "\n```")
DEEPSEEK_V31 = _deepseek(f"{{name}}{DEEPSEEK_TOKENS.separator}", "")
KIMI_K2 = ToolFamily(
    SectionedCalls(KIMI_TOKENS, _kimi_head),
    CallSyntax(
        f"{KIMI_TOKENS.call}functions.{{name}}:",
        KIMI_TOKENS.call_end,
        trigger=KIMI_TOKENS.begin,
        section=(KIMI_TOKENS.begin, KIMI_TOKENS.end),
        behind_number=KIMI_TOKENS.separator,
    ),
    markers=KIMI_TOKENS.all,
    begins=(KIMI_TOKENS.begin, KIMI_TOKENS.call),
)
