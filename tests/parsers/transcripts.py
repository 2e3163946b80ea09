"""Answers of models, with what the parsers make of them: recorded ones, and those that parsers of
other servers are known to misread.

The short notation of an answer's events is a list of texts: content is `say`, reasoning `think`,
a call `call` with its joined arguments, text of a malformed call `bad`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from aserve.parsers.events import (
    Content,
    Malformed,
    ParsedEvent,
    Reasoning,
    ToolArguments,
    ToolCallStart,
    ToolSpec,
    joined,
)

Story = list[tuple[str, ...]]
WEATHER = ToolSpec(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "hourly": {"type": "boolean"},
            "limits": {"type": "object"},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["city"],
    },
)
TIME = ToolSpec("get_time", {"type": "object", "properties": {}})
TOOLS = (WEATHER, TIME)


@dataclass(frozen=True)
class Transcript:
    """`story` is what the answer `text` says."""

    name: str
    text: str
    story: Story
    tools: str | None = None
    reasoning: str | None = None
    inside: bool = False
    specs: Sequence[ToolSpec] = field(default=TOOLS)


def story_of(events: Iterable[ParsedEvent]) -> Story:
    story: Story = []
    for event in joined(events):
        match event:
            case Content(text):
                story.append(("say", text))
            case Reasoning(text):
                story.append(("think", text))
            case ToolCallStart(_, name, call_id):
                story.append(("call", name, "") if call_id is None else ("call", name, "", call_id))
            case ToolArguments(_, text):
                kind, name, _, *rest = story[-1]
                story[-1] = (kind, name, text, *rest)
            case Malformed(text, reason):
                assert reason, "the reason is in the first fragment"
                story.append(("bad", text))
    return story
