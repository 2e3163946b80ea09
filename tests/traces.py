"""Random traces against the oracle: a scheduler, a fake device, and chaos between them.

A `Trace` is a value: it can be drawn by hypothesis, saved and run again. `run_trace` drives it and
asserts that every sequence's tokens are those of the plain engine, that it ends in one final
message, and that nothing is left behind.
"""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path

import msgspec

from aserve.channel import Codec
from aserve.errors import AserveError
from aserve.messages import (
    AdmitRequest,
    BuildMask,
    Cancel,
    CancelReason,
    EngineSpec,
    Launch,
    PromptLogprobs,
    Refused,
    Resync,
    Retired,
    Sample,
    SampleResult,
    ScheduleBatch,
    SchedulerEffect,
    SchedulerEvent,
    StepFailed,
    StepOutput,
    StepResult,
    array_i32,
)
from aserve.observability.recording import Recorder
from aserve.scheduling.state import SchedulerState
from tests.fakes import FakeDevice, ToyMatchers, expected_outputs, expected_prompt, min_tokens_of

POISON_SEED = 666  # a request with this seed breaks every step that names it
MAX_TURNS = 3_000
REASONS: tuple[CancelReason, ...] = ("stop", "cancelled", "deadline", "shutdown")
EVENTS = Codec(SchedulerEvent)
EFFECTS = Codec(SchedulerEffect)


class Trace(msgspec.Struct, frozen=True):
    spec: EngineSpec
    requests: tuple[AdmitRequest, ...]
    seed: int  # of the order of events
    cancel_rate: float = 0.0
    fail_rate: float = 0.0
    events_per_turn: int = 1


class Story(msgspec.Struct):
    """What a client of one sequence saw."""

    tokens: list[int] = []
    scores: list[PromptLogprobs] = []
    embeddings: list[bytes] = []
    ends: list[str] = []
    cancelled: bool = False


class TraceRun:
    """One trace being driven; `turns` is the recorded list of event lists."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.chaos = random.Random(trace.seed)
        self.state = SchedulerState(trace.spec, debug_checks=True)
        self.device = FakeDevice(
            trace.spec, must_fail=self._must_fail, must_fail_sample=self._must_fail_sample
        )
        self.matchers = ToyMatchers(trace.spec.vocab_size)
        self.commands: deque[ScheduleBatch | Sample | Resync] = deque()
        self.asks: deque[BuildMask] = deque()
        self.arrivals = deque(trace.requests)
        self.requests = {request.request_id: request for request in trace.requests}
        self.stories = {
            (request.request_id, child): Story()
            for request in trace.requests
            for child in range(request.sampling.n)
        }
        self.refused: dict[str, Refused] = {}
        self.turns: list[list[SchedulerEvent]] = []
        self.hurt: set[bytes] = set()  # rows of failed steps that have not gone well since
        self.batches: list[ScheduleBatch] = []
        self.pages: dict[int, list[int]] = {}  # by row, of the first group, as batches write them
        self.num_shared_pages = 0  # summed over batches

    def run(self) -> None:
        while self.arrivals or self.commands or self.asks or not self.state.is_idle:
            assert len(self.turns) < MAX_TURNS, "the trace does not come to an end"
            events = self._next_events()
            can_move = events or self.commands or self.asks or self.state.is_idle
            assert can_move, f"nobody moves: {self._who_waits()}"
            self.turns.append(events)
            for effect in self.state.step([EVENTS.round_trip(event) for event in events]):
                self._perform(EFFECTS.round_trip(effect))
        self._check_end()

    def save(self, path: Path) -> None:
        """Writes the events so far as a recording; the last turn, in which it broke, included."""
        recorder = Recorder(path, spec=self.trace.spec)
        state = SchedulerState(self.trace.spec)
        for turn in self.turns:
            recorder.begin(turn)
            try:
                recorder.finish(state.step(turn))
            except (AssertionError, AserveError, LookupError):
                break  # the recording ends inside the turn that broke
        recorder.close()

    def _next_events(self) -> list[SchedulerEvent]:
        events: list[SchedulerEvent] = []
        for _ in range(self.chaos.randint(1, self.trace.events_per_turn)):
            event = self._next_event()
            if event is not None:
                events.append(event)
        return events

    def _next_event(self) -> SchedulerEvent | None:
        if self.chaos.random() < self.trace.cancel_rate:
            return self._cancel_somebody()
        sources = [source for source in (self.arrivals, self.commands, self.asks) if source]
        if not sources:
            return None
        source = self.chaos.choice(sources)
        if source is self.arrivals:
            return self.arrivals.popleft()
        if source is self.asks:
            return self.matchers.fill(self.asks.popleft())
        return self._complete(self.commands.popleft())

    def _complete(self, command: ScheduleBatch | Sample | Resync) -> SchedulerEvent | None:
        result: StepResult | SampleResult | StepFailed | None = self.device.run(command)
        return result

    def _cancel_somebody(self) -> SchedulerEvent:
        """Known, finished, refused or never seen: a cancel may name anything at any moment."""
        request_id, child = self.chaos.choice([*self.stories, ("nobody", 0)])
        if (request_id, child) == ("nobody", 0):
            return Cancel(request_id, None, 0, "cancelled")
        named = None if self.chaos.random() < 0.3 else child
        for key, story in self.stories.items():
            if key[0] == request_id and named in (None, key[1]) and not story.ends:
                story.cancelled = True
        kept = self.chaos.randint(0, len(self.stories[request_id, child].tokens))
        return Cancel(request_id, named, kept, self.chaos.choice(REASONS))

    def _perform(self, effect: SchedulerEffect) -> None:
        match effect:
            case Launch():
                self.commands.append(effect.batch)
                self.batches.append(effect.batch)
                self._check_shared_pages(effect.batch)
            case Sample() | Resync():
                self.commands.append(effect)
            case BuildMask():
                self.asks.append(effect)
            case StepOutput():
                for output in effect.sequences:
                    story = self.stories[output.request_id, output.child]
                    first = self.requests[output.request_id].outputs
                    before = len(array_i32(first[output.child])) if first else 0
                    assert not story.ends, "an output after the last message"
                    assert output.position == before + len(story.tokens), (
                        "an output is lost or doubled"
                    )
                    story.tokens += array_i32(output.token_ids).tolist()
                    if output.prompt_logprobs is not None:
                        story.scores.append(output.prompt_logprobs)
                    if output.embedding is not None:
                        story.embeddings.append(output.embedding)
            case Retired():
                self.stories[effect.request_id, effect.child].ends.append(effect.reason)
            case Refused():
                assert effect.request_id not in self.refused
                self.refused[effect.request_id] = effect

    def _check_shared_pages(self, batch: ScheduleBatch) -> None:
        """Counted as the rows' page tables say it, page by page."""
        for init in batch.row_inits:
            self.pages[init.row] = []
        writes = batch.page_writes[0]
        rows, columns, pages = map(array_i32, (writes.rows, writes.columns, writes.pages))
        for row, column, page in zip(rows.tolist(), columns.tolist(), pages.tolist(), strict=True):
            assert column == len(self.pages[row])
            self.pages[row].append(page)
        tables = [self.pages[row] for row in array_i32(batch.rows).tolist()]
        num_whole = int(array_i32(batch.kv_lens).min()) // self.trace.spec.page_size
        num_shared = 0
        while num_shared < num_whole and len({table[num_shared] for table in tables}) == 1:
            num_shared += 1
        is_named = self.trace.spec.names_shared_pages and len(tables) > 1
        assert batch.shared_pages == (num_shared if is_named else 0)
        self.num_shared_pages += batch.shared_pages

    def _must_fail(self, batch: ScheduleBatch) -> bool:
        keys = self._keys(batch.rows)
        is_poisoned = any(_is_poisoned(key) for key in keys)
        return is_poisoned or self._fails_now(keys, is_whole=not batch.held_rows)

    def _must_fail_sample(self, sample: Sample) -> bool:
        return self._fails_now(self._keys(sample.rows), is_whole=True)

    def _keys(self, rows: bytes) -> list[bytes]:
        return [self.device.rows[row].key for row in array_i32(rows).tolist()]

    def _fails_now(self, keys: list[bytes], *, is_whole: bool) -> bool:
        """Now and then, but never twice in a row on one row alone: that would rightly end it.

        A step with held rows has gone well when its Sample has.
        """
        may_fail = len(keys) > 1 or keys[0] not in self.hurt
        fails = may_fail and self.chaos.random() < self.trace.fail_rate
        if fails:
            self.hurt.update(keys)
        elif is_whole:
            self.hurt.difference_update(keys)
        return fails

    def _check_end(self) -> None:
        for (request_id, child), story in self.stories.items():
            request = self.requests[request_id]
            if request_id in self.refused:
                assert not story.ends
                assert not story.tokens
                continue
            assert len(story.ends) == 1, f"{request_id}/{child} ended {story.ends}"
            self._check_tokens(request, child, story)
            self._check_prompt(request, child, story)
        board = self.state.board
        assert board.rows.num_free == self.trace.spec.max_rows
        board.cache.check([])
        board.cache.evict_all()
        for index, group in enumerate(self.trace.spec.groups):
            assert board.cache.num_free(index) == group.num_pages - 1

    def _check_tokens(self, request: AdmitRequest, child: int, story: Story) -> None:
        before = array_i32(request.outputs[child]).tolist() if request.outputs else []
        expected = expected_outputs(request, child, self.trace.spec)
        got = before + story.tokens
        reason = story.ends[0]
        assert got == expected[: len(got)], f"{request.request_id}/{child}: {got} is not {expected}"
        if reason == "error":
            assert request.sampling.seed == POISON_SEED, "an innocent request was failed"
        elif not story.cancelled:
            assert got == expected, f"{request.request_id}/{child} ended early: {got} of {expected}"
            assert reason == _reason(request, expected)

    def _check_prompt(self, request: AdmitRequest, child: int, story: Story) -> None:
        """Scores come once each and in order; a client that stayed has all, and the embedding."""
        expected = expected_prompt(request, child, self.trace.spec)
        embeddings = [] if expected.embedding is None else [expected.embedding]
        if expected.scores is None:
            assert not story.scores
        elif story.scores:
            got = joined(story.scores)
            assert got == cut(expected.scores, len(got.chosen) // 4), request.request_id
        if not story.cancelled and story.ends != ["error"]:
            num_scored = sum(len(scores.chosen) for scores in story.scores)
            assert num_scored == (len(expected.scores.chosen) if expected.scores else 0)
            assert story.embeddings == embeddings
        assert story.embeddings in ([], embeddings)

    def _who_waits(self) -> str:
        from aserve.scheduling.check import describe

        return "; ".join(describe(sequence) for sequence in self.state.board.living())


def joined(runs: list[PromptLogprobs]) -> PromptLogprobs:
    """Runs that follow each other as one, of row 0."""
    position = runs[0].position
    for run in runs:
        assert run.position == position, "a score is lost or doubled"
        position += len(run.chosen) // 4
    return PromptLogprobs(
        row=0,
        position=runs[0].position,
        chosen=b"".join(run.chosen for run in runs),
        ranks=b"".join(run.ranks for run in runs),
        top_ids=b"".join(run.top_ids for run in runs),
        top_logprobs=b"".join(run.top_logprobs for run in runs),
    )


def cut(run: PromptLogprobs, num_tokens: int) -> PromptLogprobs:
    """The first tokens of a run."""
    top_bytes = len(run.top_ids) // (len(run.chosen) // 4) * num_tokens
    return PromptLogprobs(
        row=run.row,
        position=run.position,
        chosen=run.chosen[: 4 * num_tokens],
        ranks=run.ranks[: 4 * num_tokens],
        top_ids=run.top_ids[:top_bytes],
        top_logprobs=run.top_logprobs[:top_bytes],
    )


def _reason(request: AdmitRequest, expected: list[int]) -> str:
    ended = len(expected) > min_tokens_of(request.sampling) and expected[-1] in request.end_ids
    return "stop" if ended else "length"


def _is_poisoned(key: bytes) -> bool:
    return bool(key) and msgspec.msgpack.decode(key)["seed"] == POISON_SEED
