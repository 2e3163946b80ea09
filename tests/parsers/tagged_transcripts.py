"""Answers with calls between tags, as Hermes, Qwen and the bundled model write them."""

from __future__ import annotations

from tests.parsers.transcripts import Story, Transcript

ROME = '{"city": "Rome"}'
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
IN_ROME = ("call", "get_weather", ROME)


def hermes(name: str, text: str, *story: tuple[str, ...]) -> Transcript:
    return Transcript(name, text, list(story), tools="hermes")


def arguments(name: str, text: str, expected: str | None = None) -> Transcript:
    """A call whose arguments are `text`, and `expected` where they are not the same."""
    answer = f'<tool_call>{{"name": "get_weather", "arguments": {text}}}</tool_call>'
    return hermes(name, answer, ("call", "get_weather", text if expected is None else expected))


def malformed(name: str, inner: str) -> Transcript:
    """A call that is malformed before it starts, between other text."""
    bad = f"<tool_call>{inner}</tool_call>"
    return hermes(name, f"a {bad} b", ("say", "a"), ("bad", f" {bad}"), ("say", "b"))


def broken(name: str, inner: str, *story: tuple[str, ...]) -> Transcript:
    """A call that becomes malformed after it has started."""
    return hermes(name, f'<tool_call>{{"name": "get_weather", "arguments": {inner}', *story)


def cut(name: str, text: str, *story: tuple[str, ...]) -> Transcript:
    return hermes(f"cut {name}", text, *story)


TAGGED: tuple[Transcript, ...] = (
    hermes("only content", "Hello <b>, 1 < 2.\n", ("say", "Hello <b>, 1 < 2.\n")),
    hermes("nothing", ""),
    hermes("only space", " \n ", ("say", " \n ")),
    hermes("one call", CALL, IN_ROME),
    hermes(
        "content around",
        f"Look:\n\n{CALL}\n\nDone.\n",
        ("say", "Look:"),
        IN_ROME,
        ("say", "Done.\n"),
    ),
    hermes("parallel", f"{CALL}\n{CALL}\n", IN_ROME, IN_ROME),
    hermes("adjacent", CALL + CALL, IN_ROME, IN_ROME),
    hermes("much space before", "a" + " " * 100 + CALL, ("say", "a" + " " * 36), IN_ROME),
    hermes("almost a tag", f"<tool_call<tool_cal {CALL}", ("say", "<tool_call<tool_cal"), IN_ROME),
    arguments("nested braces in a string", '{"city": "a}}{\\"{b"}'),
    arguments("the end tag in a string", '{"city": "</tool_call>"}'),
    arguments("the begin tag in a string", '{"city": "<tool_call>"}'),
    arguments("escapes", r'{"city": "\\\"\n\t\/ \u00e9 \ud83d\ude00"}'),
    arguments(
        "every kind of value", '{"a": [1, -0.5e+3, {"b": []}], "c": null, "d": true, "e": {}}'
    ),
    arguments("other languages", '{"city": "東京 🗼"}'),
    arguments("space everywhere", '{ "city"\n: "Rome" ,\t"days" : 0 }'),
    arguments("empty arguments", "{}"),
    arguments("no arguments at all", "null", "{}"),
    arguments(
        "in a string", r'"{\"city\": \"Rome \\\"x\\\" \\u00e9\"}"', r'{"city": "Rome \"x\" \u00e9"}'
    ),
    arguments(
        "in an escaped string", r'"\u007b\"a\": \"\ude00\ud83d\ude00\ud83d\"}"', '{"a": "�😀�"}'
    ),
    arguments("in an empty string", '" "', "{}"),
    hermes(
        "no arguments key",
        '<tool_call>{"name": "get_time"}</tool_call>',
        ("call", "get_time", "{}"),
    ),
    hermes(
        "parameters, type and id",
        '<tool_call>{"type": "function", "id": "c1", "name": "f", "parameters": {}}</tool_call>',
        ("call", "f", "{}", "c1"),
    ),
    hermes(
        "arguments before the name",
        '<tool_call>{"arguments": {"city": "Rome"}, "name": "get_weather"}</tool_call>',
        IN_ROME,
    ),
    hermes(
        "arguments twice",
        '<tool_call>{"name": "f", "arguments": {"a": 1}, "parameters": {"b": 2}}</tool_call>',
        ("call", "f", '{"a": 1}'),
    ),
    hermes(
        "escaped name",
        '<tool_call>{"na\\u006de": "g\\u00e9t", "arguments": {}}</tool_call>',
        ("call", "gét", "{}"),
    ),
    hermes("an unknown tool", CALL.replace("get_weather", "rm"), ("call", "rm", ROME)),
    hermes(
        "no end tag before the next call",
        CALL.removesuffix("</tool_call>") + CALL,
        IN_ROME,
        IN_ROME,
    ),
    malformed("no object", "get_weather"),
    malformed("empty", ""),
    malformed("a number as name", '{"name": 5, "arguments": {}}'),
    malformed("an empty name", '{"name": "", "arguments": {}}'),
    malformed("null as name", '{"name": null, "arguments": {}}'),
    malformed("no name", '{"arguments": {"city": "Rome"}}'),
    malformed("arguments in a list", '{"name": "f", "arguments": ["Rome"]}'),
    malformed("a number as arguments", '{"name": "f", "arguments": 5}'),
    malformed("a string as arguments", '{"name": "f", "arguments": "Rome"}'),
    hermes(
        "a call in a string that is no object",
        f'<tool_call>{{"name": "f", "arguments": "x {CALL}',
        ("bad", '<tool_call>{"name": "f", "arguments": "x '),
        IN_ROME,
    ),
    hermes(
        "a call in a name that is too long",
        f'<tool_call>{{"name": "{"f" * 1000}{CALL}',
        ("bad", f'<tool_call>{{"name": "{"f" * 1000}'),
        IN_ROME,
    ),
    hermes(
        "a call behind too much text",
        f'<tool_call>{{"x": "{"f" * 66_000}{CALL}',
        ("bad", f'<tool_call>{{"x": "{"f" * 66_000}'),
        IN_ROME,
    ),
    malformed("single quotes", "{'name': 'f', 'arguments': {}}"),
    malformed("a line end in the name", '{"name": "f\n"}'),
    malformed("an invalid escape in the name", r'{"name": "\q"}'),
    malformed("invalid digits in the name", r'{"name": "\u00_1"}'),
    malformed("an invalid extra value", '{"x": trap, "name": "f"}'),
    malformed("a name without end", '{"name": "' + "f" * 1100 + '"}'),
    malformed("too much before the name", '{"x": "' + "a" * 66_000 + '", "name": "f"}'),
    malformed("too deep", '{"x": ' + "[" * 200 + '1, "name": "f"}'),
    broken(
        "an invalid value",
        '{"city": Rome}}</tool_call> b',
        ("call", "get_weather", '{"city": '),
        ("bad", "Rome}}</tool_call>"),
        ("say", "b"),
    ),
    broken(
        "a trailing comma",
        '{"city": "Rome",}}</tool_call>' + CALL,
        ("call", "get_weather", '{"city": "Rome",'),
        ("bad", "}}</tool_call>"),
        IN_ROME,
    ),
    broken(
        "a line end in a string",
        '{"city": "Ro\nme"}}</tool_call>',
        ("call", "get_weather", '{"city": "Ro'),
        ("bad", '\nme"}}</tool_call>'),
    ),
    broken(
        "one brace too many", '{"city": "Rome"}}}</tool_call>', IN_ROME, ("bad", "}</tool_call>")
    ),
    broken("one brace too few", '{"city": "Rome"}</tool_call>', IN_ROME, ("bad", "</tool_call>")),
    broken(
        "rubbish in a string of arguments",
        r'"{\"city\": 1} x"}</tool_call>',
        ("call", "get_weather", '{"city": 1}'),
        ("bad", 'x"}</tool_call>'),
    ),
    cut("in the tag", "a\n<tool_ca", ("say", "a\n<tool_ca")),
    cut("behind the tag", "a\n<tool_call>", ("say", "a"), ("bad", "\n<tool_call>")),
    cut("in the name", '<tool_call>{"name": "get_w', ("bad", '<tool_call>{"name": "get_w')),
    cut("before the arguments", CALL[:35], ("bad", CALL[:35])),
    cut("in the arguments", CALL[:-16], ("call", "get_weather", '{"city": "Rome')),
    cut("in the end tag", CALL[:-4], IN_ROME),
    cut("before the end tag", CALL.removesuffix("</tool_call>"), IN_ROME),
    cut(
        "in an escape",
        r'<tool_call>{"name": "f", "arguments": "{\"a\": \"\u0',
        ("call", "f", '{"a": "'),
    ),
)

THINK = "7+5=12 20+10=30"


def thinking(name: str, text: str, *story: tuple[str, ...], **fields: object) -> Transcript:
    options = {"tools": "hermes", "reasoning": "qwen3", **fields}
    return Transcript(name, text, list(story), **options)  # type: ignore[arg-type]  # named as there


THOUGHT: Story = [("think", THINK)]
REASONING: tuple[Transcript, ...] = (
    thinking("tags", f"<think>\n{THINK}\n</think>\n\n42", *THOUGHT, ("say", "42")),
    thinking("space before", f" \n<think>{THINK}</think>42", *THOUGHT, ("say", "42")),
    thinking("then a call", f"<think>{THINK}</think>\n{CALL}", *THOUGHT, IN_ROME),
    thinking("empty", "<think>\n\n</think>\n\n42", ("say", "42")),
    thinking("none", "42 <think>x</think>", ("say", "42 <think>x</think>")),
    thinking("unclosed", f"<think>{THINK} </thin\n", ("think", f"{THINK} </thin\n")),
    thinking("only open", "<think>"),
    thinking("inside", f"{THINK}\n</think>42", *THOUGHT, ("say", "42"), inside=True),
    thinking(
        "inside and opened again", f"<think>{THINK}</think>4", *THOUGHT, ("say", "4"), inside=True
    ),
    thinking(
        "a call is thought of", f"<think>a {CALL}</think>4", ("think", f"a {CALL}"), ("say", "4")
    ),
    thinking("without tools", f"<think>{THINK}</think>{CALL}", *THOUGHT, ("say", CALL), tools=None),
    thinking(
        "the bundled model",
        "<|think|>7+5=12<|/think|><|tool_call|>"
        '{"name": "get_weather", "arguments": {"city": "Rome"}}<|/tool_call|>',
        ("think", "7+5=12"),
        IN_ROME,
        tools="aserve_tiny",
        reasoning="aserve_tiny",
    ),
    *(
        thinking(name, f"{THINK}\n</think>\n{CALL}", *THOUGHT, IN_ROME, inside=True, reasoning=name)
        for name in ("deepseek_r1", "deepseek_v3", "qwen3_thinking")
    ),
    thinking("Kimi", f"◁think▷{THINK}◁/think▷42", *THOUGHT, ("say", "42"), reasoning="kimi"),
    thinking(
        "Granite",
        f"Here's my thought process:\n{THINK}\nHere is my response:\n42",
        *THOUGHT,
        ("say", "42"),
        reasoning="granite",
    ),
    thinking(
        "Granite, not quite",
        "Here's my thought.",
        ("say", "Here's my thought."),
        reasoning="granite",
    ),
)
