"""The detokenizer actor: chunks, stop strings, and exactly one end for every request."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aserve.actors.detokenizer import DetokenizerActor
from aserve.actors.text_slices import slices
from aserve.channel import Channel
from aserve.errors import ErrorInfo, QueueFull
from aserve.messages.base import FinishReason, array_i32, pack_i32
from aserve.messages.changes import Amend, Amended, SequenceState
from aserve.messages.output import (
    DetokenizerEvent,
    OutputChunk,
    Refused,
    Retired,
    SequenceOutput,
    StepOutput,
    Usage,
)
from aserve.messages.requests import Cancel, EngineEvent, OpenText, SamplingParams
from aserve.messages.results import PromptLogprobs, RowLogprobs
from tests.text.vocabularies import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
(EOS_ID,) = TOKENIZER.eos_ids
TEXT = "hello 한국어 🚀 stop sign"
IDS = TOKENIZER.encode(TEXT, with_special=False)


class Sent(Channel[EngineEvent]):
    """Keeps what is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[EngineEvent] = []

    def send(self, message: EngineEvent) -> None:
        self.messages.append(message)


class Bench:
    """The actor driven by hand: what it delivers, and what it sends to the engine."""

    def __init__(self) -> None:
        self.chunks: list[OutputChunk] = []
        engine = Sent()
        self.cancels = engine.messages
        self.actor = DetokenizerActor(
            TOKENIZER,
            deliver=self.chunks.append,
            answer=lambda _: None,
            engine=engine,
            inbox=Channel(),
        )

    def handle(self, *events: DetokenizerEvent) -> list[OutputChunk]:
        """The chunks that this one inbox batch makes."""
        before = len(self.chunks)
        for parts in slices(events, self.actor.num_children):
            for part in parts:
                self.actor.advance(part)
        return self.chunks[before:]

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def token_ids(self) -> list[int]:
        return [i for chunk in self.chunks for i in array_i32(chunk.token_ids).tolist()]


def opened(**sampling: Any) -> OpenText:
    return OpenText("r", 11, SamplingParams(seed=1, **sampling))


def output(token_ids: list[int], position: int = 0, child: int = 0, **fields: Any) -> StepOutput:
    return StepOutput(1, (SequenceOutput("r", child, position, pack_i32(token_ids), 4, **fields),))


def retired(reason: FinishReason = "length", child: int = 0, **fields: Any) -> Retired:
    return Retired("r", child, reason, 0, **fields)


@given(st.lists(st.integers(0, len(IDS)), max_size=6), st.lists(st.booleans(), max_size=8))
def test_any_split_into_steps_and_batches_gives_the_same_answer(
    cuts: list[int], joins: list[bool]
) -> None:
    """Trap 15, and the streamed text is the unstreamed one."""
    borders = [0, *sorted(cuts), len(IDS)]
    steps = [output(IDS[a:b], a) for a, b in itertools.pairwise(borders)]
    events: list[DetokenizerEvent] = [opened(), *steps, retired()]
    bench = Bench()
    batch: list[DetokenizerEvent] = []
    for i, event in enumerate(events):
        batch.append(event)
        if i >= len(joins) or not joins[i]:
            bench.handle(*batch)
            batch = []
    bench.handle(*batch)
    assert (bench.text, bench.token_ids) == (TEXT, IDS)
    assert [chunk.is_last for chunk in bench.chunks].count(True) == 1
    assert bench.chunks[-1].usage == Usage(11, len(IDS), 4)
    assert bench.actor.num_requests == 0


def test_text_that_is_held_back_makes_no_chunk_and_comes_at_the_end() -> None:
    bench = Bench()
    stop_at = TEXT.index("stop")
    head = TOKENIZER.encode(TEXT[:stop_at], with_special=False)
    tail = TOKENIZER.encode("st", with_special=False)
    bench.handle(opened(stop=("stop sign!",)), output(head))
    assert bench.handle(output(tail, len(head))) == []
    (last,) = bench.handle(retired())
    assert (last.text, bench.text) == ("st", TEXT[:stop_at] + "st")


@given(st.lists(st.integers(0, len(IDS)), max_size=6))
def test_a_stop_string_cuts_text_usage_and_logprobs_at_the_same_token(cuts: list[int]) -> None:
    """Trap 5: several tokens arrive at once, and the stop is in their middle."""
    borders = [0, *sorted(cuts), len(IDS)]
    bench = Bench()
    bench.handle(opened(stop=("op s", "never"), logprobs=1))
    for a, b in itertools.pairwise(borders):
        if a < b:
            bench.handle(output(IDS[a:b], a, logprobs=(run_of(IDS[a:b]),)))
    kept = TEXT[: TEXT.index("op s")]
    assert bench.text == kept
    assert bench.token_ids == IDS[: len(bench.token_ids)]
    text_of_kept = TOKENIZER.decode(bench.token_ids)
    assert text_of_kept.startswith(kept)
    assert not TOKENIZER.decode(bench.token_ids[:-1]).startswith(kept)
    logprobs = [entry for chunk in bench.chunks for entry in chunk.logprobs]
    assert [entry.token_id for entry in logprobs] == bench.token_ids
    last = bench.chunks[-1]
    assert (last.finish_reason, last.stop_reason, last.is_last) == ("stop", "op s", True)
    assert last.usage.completion_tokens == len(bench.token_ids)
    assert bench.cancels == [Cancel("r", 0, len(bench.token_ids), "stop")]


@given(st.lists(st.integers(0, len(IDS)), max_size=6))
def test_b10_drafts_behind_a_stop_string_do_not_count_as_accepted(cuts: list[int]) -> None:
    """Every output is a window whose last token was drawn, and whose others are accepted drafts."""
    borders = [0, *sorted({*cuts, len(IDS)} - {0})]
    bench = Bench()
    bench.handle(opened(stop=("한국어",)))
    for a, b in itertools.pairwise(borders):
        bench.handle(output(IDS[a:b], a, num_drafts=max(b - a, 1)))
    usage = bench.chunks[-1].usage
    places = [
        number - start
        for start, end in itertools.pairwise(borders)
        for number in range(start + 1, min(end, usage.completion_tokens + 1))
    ]
    assert usage.accepted_drafts == tuple(
        places.count(1 + n) for n in range(max(places, default=0))
    )
    assert sum(usage.accepted_drafts) == len(places)
    windows = [end for start, end in itertools.pairwise(borders) if start < len(IDS)]
    stop_at = next(n for n, end in enumerate(windows, start=1) if end >= usage.completion_tokens)
    assert stop_at <= usage.draft_windows <= len(windows)
    assert usage.draft_tokens == sum(
        max(b - a, 1) for a, b in itertools.pairwise(borders[: usage.draft_windows + 1])
    )


def run_of(token_ids: list[int]) -> RowLogprobs:
    """Logprobs that name their token: chosen -id, and one alternative more than asked for."""
    chosen = -np.array(token_ids, np.float32)
    top_ids = np.repeat(np.array(token_ids, np.int32)[:, None], 2, axis=1)
    top_logprobs = np.repeat(chosen[:, None], 2, axis=1)
    return RowLogprobs(1, chosen.tobytes(), top_ids.tobytes(), top_logprobs.tobytes())


def test_what_was_in_flight_behind_a_stop_falls_away_until_the_sequence_retires() -> None:
    bench = Bench()
    bench.handle(opened(stop=("한",)), output(IDS))
    assert bench.actor.num_requests == 1
    assert bench.handle(output(IDS, len(IDS)), output(IDS, 2 * len(IDS))) == []
    assert bench.handle(retired("stop")) == []
    assert bench.actor.num_requests == 0
    assert [chunk.is_last for chunk in bench.chunks] == [True]
    assert len(bench.cancels) == 1


def test_a_sequence_that_already_retired_is_not_cancelled_for_its_stop_string() -> None:
    bench = Bench()
    (chunk,) = bench.handle(opened(stop=("한",)), output(IDS), retired("length"))
    assert (chunk.text, chunk.finish_reason) == ("hello ", "stop")
    assert (bench.cancels, bench.actor.num_requests) == ([], 0)


def test_logprobs_come_with_their_text_and_offsets() -> None:
    """A banned token is no alternative, and chunks travel as msgpack."""
    bench = Bench()
    runs = (run_of(IDS[:2]), run_of(IDS[2:]))
    banned = np.frombuffer(runs[0].top_logprobs, np.float32).copy()
    banned[0] = -np.inf
    runs = (msgspec.structs.replace(runs[0], top_logprobs=banned.tobytes()), runs[1])
    bench.handle(opened(logprobs=1), output(IDS, logprobs=runs), retired())
    (chunk,) = bench.chunks
    entries = chunk.logprobs
    assert [entry.logprob for entry in entries] == [-float(i) for i in IDS]
    assert [len(entry.top) for entry in entries] == [0] + [1] * (len(IDS) - 1)
    assert b"".join(entry.token_bytes for entry in entries).decode() == TEXT
    offsets = [len(TOKENIZER.decode(IDS[:i]).rstrip("\ufffd")) for i in range(len(IDS))]
    assert [entry.text_offset for entry in entries] == offsets
    packed = msgspec.msgpack.encode(chunk)
    assert msgspec.msgpack.decode(packed, type=OutputChunk) == chunk


@pytest.mark.parametrize(
    ("sampling", "ids", "stop_id", "text", "stop_reason"),
    [
        ({}, [*IDS, EOS_ID], EOS_ID, TEXT, None),
        ({"stop_token_ids": (IDS[-1],)}, IDS, IDS[-1], TOKENIZER.decode(IDS[:-1]), IDS[-1]),
    ],
)
def test_the_token_that_ended_it_is_counted_and_has_no_text(
    sampling: dict[str, Any], ids: list[int], stop_id: int, text: str, stop_reason: int | None
) -> None:
    bench = Bench()
    (chunk,) = bench.handle(opened(**sampling), output(ids), retired("stop", stop_id=stop_id))
    assert (chunk.text, chunk.usage.completion_tokens) == (text, len(ids))
    assert (chunk.finish_reason, chunk.stop_reason) == ("stop", stop_reason)


def test_only_the_last_child_to_end_ends_the_request() -> None:
    bench = Bench()
    bench.handle(opened(n=3, stop=("한",)))
    ends = [
        bench.handle(output(IDS, child=2)),
        bench.handle(retired(child=0)),
        bench.handle(retired(child=2)),
        bench.handle(retired(child=1)),
    ]
    assert [[(c.child, c.is_last) for c in chunks] for chunks in ends] == [
        [(2, False)],
        [(0, False)],
        [],
        [(1, True)],
    ]
    assert bench.actor.num_requests == 0


BROKEN = ErrorInfo("broken", "server_error", "step_failed", 500)


@pytest.mark.parametrize(
    ("reason", "status", "code"),
    [
        ("deadline", 408, "deadline_exceeded"),
        ("shutdown", 503, "server_draining"),
        ("error", 500, "step_failed"),
    ],
)
def test_a_failed_sequence_ends_with_its_error(
    reason: FinishReason, status: int, code: str
) -> None:
    bench = Bench()
    bench.handle(opened(), *[output(IDS[:1])] * (reason != "deadline"))
    (chunk,) = bench.handle(retired(reason, error=BROKEN if reason == "error" else None))
    assert chunk.error is not None
    assert (chunk.error.status, chunk.error.code, chunk.is_last) == (status, code, True)


def test_a_timeout_ends_with_the_text_so_far_and_says_so() -> None:
    """All children do, if one of them has any."""
    bench = Bench()
    bench.handle(opened(n=2), output(IDS[:1], child=1))
    chunks = bench.handle(retired("deadline"), retired("deadline", child=1))
    for chunk in chunks:
        assert (chunk.finish_reason, chunk.stop_reason, chunk.error) == ("length", "timeout", None)
    assert [chunk.is_last for chunk in chunks] == [False, True]
    assert bench.token_ids == IDS[:1]


@pytest.mark.parametrize("is_open", [True, False])
def test_a_refusal_is_the_only_message_of_its_request(is_open: bool) -> None:
    bench = Bench()
    if is_open:
        bench.handle(opened(n=4))
    (chunk,) = bench.handle(Refused("r", QueueFull("full").info()))
    assert chunk.error is not None
    assert (chunk.error.code, chunk.is_last, bench.actor.num_requests) == ("queue_full", True, 0)


def scored_prompt(num_tokens: int = 3, **sampling: Any) -> OpenText:
    ids = IDS[:num_tokens]
    texts = tuple(TEXT[:num_tokens])
    params = SamplingParams(seed=1, prompt_logprobs=0, **sampling)
    return OpenText("r", num_tokens, params, pack_i32(ids), texts)


def scores(position: int, num_tokens: int) -> StepOutput:
    values = np.full(num_tokens, -1, np.float32).tobytes()
    run = PromptLogprobs(1, position, values, pack_i32([1] * num_tokens), b"", b"")
    return output([], prompt_logprobs=run)


def test_what_a_child_says_waits_for_the_prompt_that_another_is_scored_for() -> None:
    bench = Bench()
    bench.handle(scored_prompt(n=2, echo=True))
    (first,) = bench.handle(output(IDS[:2], child=1))[:1]
    assert (first.text, first.token_ids, first.prompt and first.prompt.text) == ("", b"", TEXT[:1])
    assert [chunk.child for chunk in bench.handle(scores(1, 1))] == [0, 1]
    assert bench.handle(retired(child=1)) == []
    chunks = bench.handle(scores(2, 1))
    assert [(chunk.child, chunk.text, chunk.finish_reason) for chunk in chunks] == [
        (0, "", None),
        (1, "hello ", "length"),
    ]
    assert [chunk.prompt and chunk.prompt.text for chunk in chunks] == [TEXT[2], TEXT[2]]
    (last,) = bench.handle(output(IDS[:1]), retired())
    assert (last.is_last, last.prompt) == (True, None)
    assert bench.actor.num_requests == 0


def test_when_the_scored_child_fails_the_others_still_end() -> None:
    bench = Bench()
    bench.handle(scored_prompt(n=2), output(IDS[:1], child=1), retired(child=1))
    chunks = bench.handle(retired("cancelled"))
    assert [(chunk.child, chunk.finish_reason, chunk.error) for chunk in chunks] == [
        (0, "cancelled", None),
        (1, "length", None),
    ]
    assert [chunk.is_last for chunk in chunks] == [False, True]


def test_a_request_that_waits_has_no_text_until_its_first_output() -> None:
    bench = Bench()
    bench.handle(opened(n=3))
    assert (bench.actor._requests, bench.actor.num_requests) == ({}, 1)
    assert bench.actor.num_children("r") == 3, "so many times are the scores of its prompt sent"
    bench.handle(output(IDS, child=1))
    assert len(bench.actor._requests["r"].children) == 3


def test_stop_strings_that_a_waiting_request_gets_end_its_output() -> None:
    bench = Bench()
    bench.handle(opened())
    state = SequenceState(0, "waiting", 11, 0, 16, 0)
    bench.handle(Amended(Amend("r", 1, stop=(" stop",)), (state,)))
    (chunk,) = bench.handle(output(IDS))
    assert (chunk.finish_reason, chunk.stop_reason) == ("stop", " stop")
    assert bench.text == TEXT[: TEXT.index(" stop")]
