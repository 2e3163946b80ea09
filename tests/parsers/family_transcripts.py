"""Answers of the families other than Hermes, in the formats of their chat templates."""

from __future__ import annotations

from dataclasses import replace

from tests.parsers.tagged_transcripts import IN_ROME, ROME
from tests.parsers.transcripts import Transcript

NOW = ("call", "get_time", "{}")
SAY = ("say", "Look:")


def of(tools: str, name: str, text: str, *story: tuple[str, ...], **fields: object) -> Transcript:
    options = {"tools": tools, **fields}
    return Transcript(name, text, list(story), **options)  # type: ignore[arg-type]  # named as there


def llama(name: str, text: str, *story: tuple[str, ...]) -> Transcript:
    return of("llama3_json", name, text, *story)


OBJECT = '{"name": "get_weather", "parameters": {"city": "Rome"}}'
LLAMA = (
    llama("one call", OBJECT, IN_ROME),
    llama("tagged", f"<|python_tag|>{OBJECT}", IN_ROME),
    llama(
        "with semicolons",
        f'{OBJECT}; {OBJECT};{{"name": "get_time", "arguments": {{}}}}',
        IN_ROME,
        IN_ROME,
        NOW,
    ),
    llama("tagged, in lines", f"<|python_tag|>{OBJECT}\n<|python_tag|>{OBJECT}", IN_ROME, IN_ROME),
    llama("behind content", f"Look:\n{OBJECT}\n", SAY, IN_ROME),
    llama("with a type", f'{{"type": "function", {OBJECT[1:]}', IN_ROME),
    llama(
        "arguments in a string",
        OBJECT.replace('{"city": "Rome"}', r'"{\"city\": \"Rome\"}"'),
        IN_ROME,
    ),
    llama(
        "an object that is no call",
        'As {"name": "Sam", "age": 4}.',
        ("say", 'As {"name": "Sam", "age": 4}.'),
    ),
    llama(
        "a tool's description",
        '{"name": "get_time", "about": 1} x',
        ("say", '{"name": "get_time", "about": 1} x'),
    ),
    llama("code", "if (a) { b(); } else {c}", ("say", "if (a) { b(); } else {c}")),
    llama("a call within an object", f'{{"a": {OBJECT}}}', ("say", f'{{"a": {OBJECT}}}')),
    llama("tagged code", "<|python_tag|>print(1)", ("bad", "<|python_tag|>print(1)")),
    llama(
        "tagged and unknown", '<|python_tag|>{"name": "f", "parameters": {}}', ("call", "f", "{}")
    ),
    llama("cut", OBJECT[:30], ("say", OBJECT[:30])),
    llama(
        "broken",
        '{"name": "get_time", "parameters": {x}}',
        ("call", "get_time", "{"),
        ("bad", "x}}"),
    ),
)


def mistral(name: str, text: str, *story: tuple[str, ...]) -> Transcript:
    return of("mistral", name, text, *story)


LIST = '[{"name": "get_weather", "arguments": {"city": "Rome"}}]'
MISTRAL = (
    mistral("a list", f"[TOOL_CALLS]{LIST}", IN_ROME),
    mistral("a list behind a blank", f"Look: [TOOL_CALLS] {LIST}", SAY, IN_ROME),
    mistral("a list of two", f"[TOOL_CALLS]{LIST[:-1]}, {LIST[1:]}", IN_ROME, IN_ROME),
    mistral(
        "ids",
        '[TOOL_CALLS][{"name": "get_time", "arguments": {}, "id": "abcdefghi"}, '
        '{"id": "bcdefghij", "name": "get_time", "arguments": {}}]',
        NOW,  # the id came too late
        (*NOW, "bcdefghij"),
    ),
    mistral(
        "names", f"[TOOL_CALLS]get_weather[ARGS]{ROME}[TOOL_CALLS]get_time[ARGS]{{}}", IN_ROME, NOW
    ),
    mistral("a name alone", f"[TOOL_CALLS]get_weather{ROME}", IN_ROME),
    mistral(
        "a name with id",
        f"[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{ROME}",
        (*IN_ROME, "abcdefghi"),
    ),
    mistral("an object alone", f"[TOOL_CALLS]{LIST[1:-1]}", IN_ROME),
    mistral(
        "[TOOL_CALLS] in a string",
        '[TOOL_CALLS]f[ARGS]{"a": "[TOOL_CALLS]"}',
        ("call", "f", '{"a": "[TOOL_CALLS]"}'),
    ),
    mistral("no call", "[TOOL_CALLS] (none)", ("bad", "[TOOL_CALLS] (none)")),
    mistral(
        "no name in the second",
        f'[TOOL_CALLS]{LIST[:-1]}, {{"arguments": {{}}}}]',
        IN_ROME,
        ("bad", ' {"arguments": {}}]'),
    ),
    mistral("a name in quotes", '[TOOL_CALLS]"f"{}', ("bad", '[TOOL_CALLS]"f"{}')),
    Transcript(
        "thinking",
        f"[THINK]Hm.[/THINK][TOOL_CALLS]f[ARGS]{ROME}",
        [("think", "Hm."), ("call", "f", ROME)],
        "mistral",
        "mistral",
    ),
)


def pythonic(name: str, text: str, *story: tuple[str, ...]) -> Transcript:
    return of("pythonic", name, text, *story)


def literal(name: str, source: str, expected: str) -> Transcript:
    return pythonic(name, f"[get_time(a={source})]", ("call", "get_time", f'{{"a": {expected}}}'))


PYTHONIC = (
    pythonic("one call", "[get_weather(city='Rome')]", IN_ROME),
    pythonic("two calls", '[get_weather(city="Rome"), get_time()]', IN_ROME, NOW),
    pythonic("tagged", '<|python_start|>[get_weather(city="Rome",)]<|python_end|>', IN_ROME),
    pythonic("behind content", 'Look: [ get_weather( city = "Rome" ) ] ', SAY, IN_ROME),
    pythonic("two arguments", "[get_time(a=1, b=2)]", ("call", "get_time", '{"a": 1, "b": 2}')),
    literal("constants", "[True, False, None, true, null]", "[true, false, null, true, null]"),
    literal("numbers", "(1, -2.5, 1e5, +3, 1_000)", "[1, -2.5, 1e5, 3, 1000]"),
    literal("a dict", "{'b': {}, \"c\": [ ], 'd': (1,)}", '{"b": {}, "c": [], "d": [1]}'),
    literal("quotes", """'say "hi"' """, r'"say \"hi\""'),
    literal("escapes", r"'\'\n\t\\\x41\u00e9\U0001F600\d'", r'"' + r"'\n\t\\Aé😀\\d" + '"'),
    literal("surrogates", r"'\ud83d\ude00'", r'"\ud83d\ude00"'),
    literal("a line end", "'a\nb'", r'"a\nb"'),
    literal("three quotes", "'''it's \"it\"'''", r'"it' + "'" + r's \"it\""'),
    literal("no characters", "''", '""'),
    literal("brackets in a string", "')]}'", '")]}"'),
    pythonic(
        "a link",
        "See [get_weather](http://a) [1] [a, b]",
        ("say", "See [get_weather](http://a) [1] [a, b]"),
    ),
    pythonic("an unknown tool", "[rm(path='/')]", ("say", "[rm(path='/')]")),
    pythonic("an argument without keyword", "[get_time('x')]", ("say", "[get_time('x')]")),
    pythonic("a variable", "[get_time(a=b)] c", ("call", "get_time", '{"a": '), ("bad", ")] c")),
    pythonic(
        "an invalid number", "[get_time(a=01)]", ("call", "get_time", '{"a": '), ("bad", ")]")
    ),
    pythonic("cut", "[get_time(a='x", ("call", "get_time", '{"a": "x')),
)

QWEN_CALL = """<tool_call>
<function=get_weather>
<parameter=city>
Rome
</parameter>
</function>
</tool_call>"""


def qwen(name: str, text: str, *story: tuple[str, ...]) -> Transcript:
    return of("qwen3_coder", name, text, *story)


def parameter(name: str, key: str, value: str, expected: str) -> Transcript:
    text = QWEN_CALL.replace("=city", f"={key}").replace("Rome", value)
    return qwen(name, text, ("call", "get_weather", f'{{"{key}": {expected}}}'))


QWEN = (
    qwen("one call", QWEN_CALL, IN_ROME),
    qwen("two calls", f"Look:\n{QWEN_CALL}\n{QWEN_CALL}", SAY, IN_ROME, IN_ROME),
    qwen("no arguments", "<tool_call>\n<function=get_time>\n</function>\n</tool_call>", NOW),
    qwen(
        "in one line",
        QWEN_CALL.replace("\n", ""),
        IN_ROME,
    ),
    qwen("without the outer tag", QWEN_CALL[12:-13], IN_ROME),
    qwen("no end of the function", QWEN_CALL.replace("</function>\n", ""), IN_ROME),
    qwen("no end of the parameter", QWEN_CALL.replace("</parameter>\n", ""), IN_ROME),
    qwen(
        "no end before the next parameter",
        QWEN_CALL.replace("</parameter>", "<parameter=days>\n2\n</parameter>"),
        ("call", "get_weather", '{"city": "Rome", "days": 2}'),
    ),
    parameter("lines and quotes", "city", 'a\n\n "b"\\n', r'"a\n\n \"b\"\\n"'),
    parameter("a number for a string", "city", "5", '"5"'),
    parameter("an end tag in the text", "city", "<a></parameter> b", '"<a></parameter> b"'),
    parameter("the end of a call in the text", "city", "a </tool_call> b", '"a </tool_call> b"'),
    parameter("an integer", "days", "5", "5"),
    parameter("text for an integer", "days", "five", '"five"'),
    parameter("a boolean of Python", "hourly", "True", "true"),
    parameter("an object", "limits", '{"a": [1]}', '{"a": [1]}'),
    parameter("a list of Python", "tags", "['a']", "\"['a']\""),
    parameter("an unknown number", "other", "1.5", "1.5"),
    parameter("an unknown text", "other", "x y", '"x y"'),
    parameter("no text", "city", "", '""'),
    parameter("a long text", "other", "12345 " * 11_000, '"' + "12345 " * 11_000 + '"'),
    qwen(
        "prose about the tag",
        "Write <tool_call> first.",
        ("say", "Write"),
        ("bad", " <tool_call> first."),
    ),
    qwen(
        "a parameter without a name",
        "<tool_call>\n<function=f>\n<parameter=\nx>1</parameter></function></tool_call>a",
        ("call", "f", "{"),
        ("bad", "\nx>1</parameter></function></tool_call>"),
        ("say", "a"),
    ),
    qwen(
        "cut in a value",
        QWEN_CALL[: QWEN_CALL.index("\n</par")],
        ("call", "get_weather", '{"city": "Rome'),
    ),
    qwen("cut behind a value", QWEN_CALL[:-20], ("call", "get_weather", '{"city": "Rome')),
)

GLM_CALL = (
    "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>"
)


def glm(name: str, text: str, *story: tuple[str, ...], **fields: object) -> Transcript:
    return of("glm45", name, text, *story, **fields)


GLM = (
    glm("one call", GLM_CALL, IN_ROME),
    glm("in one line", f"Look: {GLM_CALL}{GLM_CALL}".replace("\n", ""), SAY, IN_ROME, IN_ROME),
    glm(
        "no arguments",
        "<tool_call>get_time</tool_call>\n<tool_call>get_time\n</tool_call>",
        NOW,
        NOW,
    ),
    glm(
        "types",
        "<tool_call>get_weather<arg_key>days</arg_key><arg_value>2</arg_value>"
        "<arg_key>city</arg_key><arg_value>2</arg_value>"
        '<arg_key>tags</arg_key><arg_value>["a"]</arg_value></tool_call>',
        ("call", "get_weather", '{"days": 2, "city": "2", "tags": ["a"]}'),
    ),
    glm(
        "an end tag in the text",
        GLM_CALL.replace("Rome", "</arg_value>x"),
        ("call", "get_weather", '{"city": "</arg_value>x"}'),
    ),
    glm("prose", "<tool_call>a b</tool_call>", ("bad", "<tool_call>a b</tool_call>")),
    glm(
        "a call ends the reasoning",
        f"<think>Hm.\n{GLM_CALL}",
        ("think", "Hm."),
        IN_ROME,
        reasoning="glm45",
    ),
    glm("cut", GLM_CALL[: GLM_CALL.index("me</arg")], ("call", "get_weather", '{"city": "Ro')),
)


def deepseek(name: str, text: str, *story: tuple[str, ...], **fields: object) -> Transcript:
    return of(
        "deepseek_v31",
        name,
        text.replace("<|", "<\uff5c").replace("|>", "\uff5c>").replace("_", "\u2581"),
        *story,
        **fields,
    )


V31 = f"<|tool_call_begin|>get-weather<|tool_sep|>{ROME}<|tool_call_end|>"
V3 = f"<|tool_call_begin|>function<|tool_sep|>get-weather\n```json\n{ROME}\n```<|tool_call_end|>"
HERE = ("call", "get-weather", ROME)
DEEPSEEK = (
    deepseek("V3.1", f"<|tool_calls_begin|>{V31}<|tool_calls_end|>", HERE),
    deepseek(
        "V3.1, two calls",
        f"Look:\n\n<|tool_calls_begin|>{V31}\n{V31}<|tool_calls_end|>",
        SAY,
        HERE,
        HERE,
    ),
    deepseek("V3", f"<|tool_calls_begin|>{V3}\n{V3}<|tool_calls_end|>", HERE, HERE),
    deepseek("no section", V31, HERE),
    deepseek("a section without end", f"<|tool_calls_begin|>{V31}", HERE),
    deepseek(
        "then content",
        f"<|tool_calls_begin|>{V31}<|tool_calls_end|>\n\nDone",
        HERE,
        ("say", "Done"),
    ),
    deepseek("no end of the call", f"<|tool_calls_begin|>{V31[:-17]}<|tool_calls_end|>", HERE),
)


def kimi(name: str, text: str, *story: tuple[str, ...], **fields: object) -> Transcript:
    return of("kimi_k2", name, text, *story, **fields)


KIMI_CALL = (
    f"<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{ROME}<|tool_call_end|>"
)
KIMI_NOW = KIMI_CALL.replace("weather:0", "time:1").replace(ROME, "{}")
SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_ROME = (*IN_ROME, "functions.get_weather:0")
KIMI = (
    kimi("one call", f"{SECTION}{KIMI_CALL}{SECTION_END}", KIMI_ROME),
    kimi(
        "two calls",
        f"Look:{SECTION}{KIMI_CALL}\n{KIMI_NOW}{SECTION_END}",
        SAY,
        KIMI_ROME,
        (*NOW, "functions.get_time:1"),
    ),
    kimi("a plain name", KIMI_CALL.replace("functions.", "").replace(":0", ""), IN_ROME),
    kimi(
        "a call ends the reasoning",
        f"<think>Hm.{SECTION}{KIMI_CALL}{SECTION_END}",
        ("think", "Hm."),
        KIMI_ROME,
        reasoning="kimi_k2",
    ),
    kimi("an empty section", f"{SECTION}{SECTION_END}a", ("bad", SECTION), ("say", "a")),
    kimi(
        "no name",
        f"{KIMI_CALL.replace('functions.get_weather:0', ' ')}a",
        ("bad", KIMI_CALL.replace("functions.get_weather:0", " ")),
        ("say", "a"),
    ),
    kimi(
        "cut",
        KIMI_CALL[: KIMI_CALL.index("}<")],
        ("call", "get_weather", '{"city": "Rome"', "functions.get_weather:0"),
    ),
)


def harmony(name: str, text: str, *story: tuple[str, ...]) -> Transcript:
    return of("gpt_oss", name, text, *story)


THOUGHT = "<|channel|>analysis<|message|>Need the weather.<|end|>"
HARMONY_CALL = (
    "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json"
    f"<|message|>{ROME}"
)
THINK = ("think", "Need the weather.")
HARMONY = (
    harmony("final alone", "<|channel|>final<|message|>Look:<|return|>", SAY),
    harmony(
        "thought and final",
        f"{THOUGHT}<|start|>assistant<|channel|>final<|message|>Look:",
        THINK,
        SAY,
    ),
    harmony("a call", f"{THOUGHT}{HARMONY_CALL}<|call|>", THINK, IN_ROME),
    harmony("a call without end token", f"{THOUGHT}{HARMONY_CALL}", THINK, IN_ROME),
    harmony(
        "the recipient in the role",
        f" to=functions.get_weather<|channel|>commentary json<|message|>{ROME}",
        IN_ROME,
    ),
    harmony("two calls", f"{HARMONY_CALL}<|call|>{HARMONY_CALL}<|call|>", IN_ROME, IN_ROME),
    harmony(
        "a preamble", f"<|channel|>commentary<|message|>Look:<|end|>{HARMONY_CALL}", SAY, IN_ROME
    ),
    harmony(
        "another recipient",
        HARMONY_CALL.replace("functions.get_weather", "browser.open"),
        ("call", "browser.open", ROME),
    ),
    harmony("a call in the analysis", HARMONY_CALL.replace("commentary", "analysis"), IN_ROME),
    harmony("no header", "Look:", SAY),
    harmony(
        "no end before the next",
        f"{THOUGHT[:-7]}<|start|>assistant<|channel|>final<|message|>Look:",
        THINK,
        SAY,
    ),
    harmony("cut in a header", f"{THOUGHT}<|start|>assist", THINK),
    harmony(
        "code as arguments",
        HARMONY_CALL.replace(ROME, "print(1)<|call|>") + HARMONY_CALL,
        ("bad", HARMONY_CALL.replace(ROME, "print(1)")),
        IN_ROME,
    ),
    Transcript("as reasoning alone", THOUGHT, [THINK], reasoning="gpt_oss"),
)

FAMILIES: tuple[Transcript, ...] = (
    *LLAMA,
    *MISTRAL,
    *(replace(row, tools="mistral_v11") for row in MISTRAL),
    *PYTHONIC,
    *QWEN,
    *GLM,
    *DEEPSEEK,
    *(replace(row, tools="deepseek_v3") for row in DEEPSEEK),
    *KIMI,
    *HARMONY,
)
