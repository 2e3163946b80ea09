"""What the parsers make of answers, wherever they are cut.

Everything is a property of every row of the tables of transcripts.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aserve.parsers.events import ParsedEvent, joined
from aserve.parsers.registry import REASONING_PARSERS, TOOL_PARSERS, kept_tokens, make_parser
from tests.parsers.family_transcripts import FAMILIES
from tests.parsers.tagged_transcripts import REASONING, TAGGED
from tests.parsers.transcripts import Transcript, story_of

ALL = (*TAGGED, *REASONING, *FAMILIES)
EVERY = pytest.mark.parametrize("row", ALL, ids=[f"{r.tools}: {r.name}" for r in ALL])
LONG = 400  # of a longer text, some of the cuts are tried


def parsed(row: Transcript, pieces: Iterable[str], *, finish: bool = True) -> list[ParsedEvent]:
    parser = make_parser(
        row.reasoning, row.tools, tool_specs=row.specs, starts_in_reasoning=row.inside
    )
    events = [event for piece in pieces for event in parser.push(piece)]
    return joined(events + (parser.finish() if finish else []))


def cuts_of(text: str) -> Iterable[int]:
    """Every place, or a few of a long text."""
    if len(text) <= LONG:
        return range(len(text) + 1)
    return sorted({0, 1, 20, *random.Random(len(text)).sample(range(len(text)), 3), len(text)})


def single(text: str) -> Iterable[str]:
    """Single characters, or pieces of a long text."""
    size = 1 if len(text) <= 2 * LONG else 997
    return (text[place : place + size] for place in range(0, len(text), size))


def test_every_parser_has_answers() -> None:
    assert {row.tools for row in ALL} == {None, *TOOL_PARSERS}
    assert {row.reasoning for row in ALL} == {None, *REASONING_PARSERS}


@EVERY
def test_an_answer_says_what_it_is_known_to_say(row: Transcript) -> None:
    assert story_of(parsed(row, [row.text])) == row.story


@EVERY
def test_the_events_are_the_same_for_every_cut(row: Transcript) -> None:
    whole = parsed(row, [row.text])
    assert parsed(row, single(row.text)) == whole
    for cut in cuts_of(row.text):
        assert parsed(row, [row.text[:cut], row.text[cut:]]) == whole, row.text[:cut]


@EVERY
def test_what_has_been_emitted_depends_on_the_text_so_far_alone(row: Transcript) -> None:
    """So nothing is late because its text came in one piece, or early because it came in many."""
    for cut in cuts_of(row.text):
        text = row.text[:cut]
        assert parsed(row, [text], finish=False) == parsed(row, single(text), finish=False), text


@EVERY
def test_an_answer_may_end_anywhere(row: Transcript) -> None:
    """Its events are those of the whole answer up to there, except for text that was held back."""
    whole = [event for event in story_of(parsed(row, [row.text])) if event[0] == "call"]
    for cut in cuts_of(row.text):
        calls = [event for event in story_of(parsed(row, [row.text[:cut]])) if event[0] == "call"]
        for call, entire in itertools.zip_longest(calls, whole[: len(calls)]):
            assert call[1] == entire[1]
            assert entire[2].startswith(call[2])


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_spliced_answers_are_read_the_same_for_every_cut(data: st.DataObject) -> None:
    """Answers of one family, cut and pasted together at random, in random pieces."""
    row = data.draw(st.sampled_from([row for row in ALL if len(row.text) < LONG]))
    family = [r.text for r in ALL if (r.tools, r.reasoning) == (row.tools, row.reasoning)]
    texts = data.draw(st.lists(st.sampled_from([t for t in family if len(t) < LONG]), max_size=4))
    ends = [data.draw(st.integers(0, len(text))) for text in texts]
    text = row.text + "".join(text[end:] for text, end in zip(texts, ends, strict=True))
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in itertools.pairwise((0, *places, len(text)))]
    whole = parsed(row, [text])
    assert parsed(row, pieces) == whole
    assert parsed(row, text) == whole


FRAGMENTS = (
    *(
        '{"name": "get_time"',
        '"arguments": ',
        '{"city": "Rome"}',
        "{",
        "}",
        "[",
        "]",
        "(",
        ")",
        ",",
    ),
    *(
        '"',
        "'",
        "\\",
        "\\u",
        "d83d",
        "\\ude00",
        ": ",
        "null",
        "nul",
        "1",
        "-",
        "get_time",
        "functions.",
    ),
    *(
        "city=",
        "\n",
        " ",
        "a",
        "é",
        "<",
        "</",
        "<|",
        "```json",
        "to=",
        "<function=",
        "<parameter=city>",
    ),
    *("</parameter>", "</function>", "assistant", "analysis"),
)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_any_text_is_read_the_same_for_every_cut(data: st.DataObject) -> None:
    """Special tokens and fragments of calls in any order."""
    tools = data.draw(st.sampled_from([None, *TOOL_PARSERS]))
    reasoning = data.draw(st.sampled_from([None, *REASONING_PARSERS]))
    fragments = sorted(kept_tokens(reasoning, tools)) * 3 + list(FRAGMENTS)
    text = "".join(data.draw(st.lists(st.sampled_from(fragments), max_size=30)))
    row = Transcript("any", text, [], tools, reasoning, inside=data.draw(st.booleans()))
    whole = parsed(row, [text])
    assert parsed(row, text) == whole
    cut = data.draw(st.integers(0, len(text)))
    assert parsed(row, [text[:cut], text[cut:]]) == whole


def test_the_arguments_of_the_tables_are_json() -> None:
    """It guards the tables: a row whose call ends well has an object as arguments."""
    for row in ALL:
        if "cut" not in row.name and not any(event[0] == "bad" for event in row.story):
            for event in row.story:
                assert event[0] != "call" or isinstance(json.loads(event[2]), dict), row.name
