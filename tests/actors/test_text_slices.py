"""Long score lists go through the detokenizer in slices, and clients cannot tell."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Iterable

import numpy as np
import pytest

from aserve.actors.detokenizer import DetokenizerActor
from aserve.actors.text_slices import (
    CHUNK_SCORES,
    MAX_SCORES,
    Part,
    TextEvent,
    num_scores,
    slices,
)
from aserve.channel import Channel, yield_to_loop
from aserve.messages.base import array_i32, pack_i32
from aserve.messages.changes import Amended
from aserve.messages.output import (
    DetokenizerEvent,
    NextTokens,
    OutputChunk,
    Retired,
    SequenceOutput,
    StepOutput,
)
from aserve.messages.requests import OpenText, SamplingParams
from aserve.messages.results import PromptLogprobs, RowLogprobs
from tests.actors.test_detokenizer import Sent
from tests.text.vocabularies import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
NUM_TOP = 20
NUM_LAUNCH_ROUNDS = 3  # of the loop: a result's callback, the pump, the scheduler


def events_of(*, num_tokens: int, n: int = 1) -> list[DetokenizerEvent]:
    """A request with all scores of its prompt and a first token in one step."""
    sampling = SamplingParams(seed=1, prompt_logprobs=NUM_TOP, logprobs=NUM_TOP, max_tokens=1, n=n)
    ids = [5 + number % 200 for number in range(num_tokens)]
    values = -np.arange(1, num_tokens, dtype=np.float32)
    scores = PromptLogprobs(
        row=1,
        position=1,
        chosen=values.tobytes(),
        ranks=pack_i32(list(range(1, num_tokens))),
        top_ids=pack_i32([7 + i for _ in range(num_tokens - 1) for i in range(NUM_TOP)]),
        top_logprobs=np.repeat(values, NUM_TOP).tobytes(),
    )
    top = np.full(NUM_TOP, -2, np.float32).tobytes()
    chosen = np.array([-1], np.float32).tobytes()
    run = RowLogprobs(1, chosen, pack_i32(list(range(NUM_TOP))), top)
    first = SequenceOutput("r", 0, 0, pack_i32([9]), 3, (run,), prompt_logprobs=scores)
    others = [SequenceOutput("r", child, 0, pack_i32([9]), 3, (run,)) for child in range(1, n)]
    texts = tuple(TOKENIZER.token(i) for i in ids)
    return [
        OpenText("r", num_tokens, sampling, pack_i32(ids), texts),
        StepOutput(1, (first, *others)),
        *(Retired("r", child, "length", 1) for child in range(n)),
    ]


def actor_of(chunks: list[OutputChunk]) -> DetokenizerActor:
    return DetokenizerActor(
        TOKENIZER,
        deliver=chunks.append,
        answer=lambda _: None,
        engine=Sent(),
        inbox=Channel(),
    )


@pytest.mark.parametrize(("num_tokens", "n"), [(2, 1), (3, 2), (1000, 1), (700, 3), (50, 128)])
def test_slices_are_bounded_and_say_the_same(num_tokens: int, n: int) -> None:
    events = events_of(num_tokens=num_tokens, n=n)
    whole: list[OutputChunk] = []
    sliced: list[OutputChunk] = []
    actor_of(whole).advance(Part("r", [part for event in events for part in split(event)]))
    actor = actor_of(sliced)
    sizes = []
    for parts in slices(events, lambda _: n):
        [part] = parts
        sizes.append(num_scores(part.events, num_children=n))
        actor.advance(part)
    assert max(sizes) <= MAX_SCORES
    for child in range(n):
        assert told(sliced, child) == told(whole, child)
    assert [chunk.is_last for chunk in sliced].index(True) == len(sliced) - 1


def split(event: DetokenizerEvent) -> Iterable[TextEvent]:
    return event.outputs() if isinstance(event, StepOutput) else (event,)


def told(chunks: list[OutputChunk], child: int) -> list[object]:
    own = [chunk for chunk in chunks if chunk.child == child]
    tokens = [token for chunk in own if chunk.prompt for token in chunk.prompt.tokens]
    scores = [entry for chunk in own for entry in chunk.logprobs]
    ids = [i for chunk in own for i in array_i32(chunk.token_ids).tolist()]
    text = "".join(chunk.text for chunk in own)
    return [tokens, scores, ids, text, own[-1].finish_reason, own[-1].usage]


def steps_of(numbers: random.Random) -> list[StepOutput | Retired]:
    """Steps of a few requests with two children. Some sequences have a record in a step, and some
    have no part in it.
    """
    events: list[StepOutput | Retired] = []
    running = {(f"r{number}", child): 0 for number in range(4) for child in range(2)}
    chosen = list(running)
    for step in range(12):
        if numbers.random() < 0.4:
            chosen = [key for key in running if numbers.random() < 0.7]
        alone = {key for key in chosen if numbers.random() < 0.1}
        outputs = {}
        for request_id, child in filter(running.__contains__, chosen):
            position = running[request_id, child]
            running[request_id, child] += 1
            token_ids = pack_i32([5 + numbers.randrange(200)])
            output = SequenceOutput(request_id, child, position, token_ids, 0)
            outputs[request_id, child] = output
        columns = [output for key, output in outputs.items() if key not in alone]
        records = tuple(output for key, output in outputs.items() if key in alone)
        events.append(StepOutput(step, records, next_tokens_of(columns) if columns else None))
        if numbers.random() < 0.2:
            request_id, child = numbers.choice(list(running))
            num_outputs = running.pop((request_id, child))
            events.append(Retired(request_id, child, "length", num_outputs))
    return events


def next_tokens_of(outputs: list[SequenceOutput]) -> NextTokens:
    return NextTokens(
        tuple(output.request_id for output in outputs),
        pack_i32([output.child for output in outputs]),
        pack_i32([output.position for output in outputs]),
        b"".join(output.token_ids for output in outputs),
        pack_i32([output.cached_len for output in outputs]),
    )


@pytest.mark.parametrize("seed", range(20))
def test_columns_of_several_steps_say_what_their_outputs_say_one_by_one(seed: int) -> None:
    opened = [OpenText(f"r{number}", 3, SamplingParams(seed=1, n=2)) for number in range(4)]
    events = steps_of(random.Random(seed))
    alone: list[OutputChunk] = []
    together: list[OutputChunk] = []
    actor = actor_of(alone)
    for event in [*opened, *events]:
        for part in split(event):
            assert not isinstance(part, Amended)
            actor.advance(Part(part.request_id, [part]))
    actor = actor_of(together)
    for parts in slices([*opened, *events], lambda _: 2):
        for each in parts:
            actor.advance(each)
    by_child = [said(chunks) for chunks in (alone, together)]
    assert by_child[0] == by_child[1]
    assert any(len(array_i32(chunk.token_ids)) > 1 for chunk in together)


def said(chunks: list[OutputChunk]) -> dict[tuple[str, int], tuple[str, bytes, object]]:
    keys = sorted({(chunk.request_id, chunk.child) for chunk in chunks})
    own = {key: [each for each in chunks if (each.request_id, each.child) == key] for key in keys}
    return {
        key: (
            "".join(chunk.text for chunk in own[key]),
            b"".join(chunk.token_ids for chunk in own[key]),
            (own[key][-1].usage, own[key][-1].finish_reason),
        )
        for key in keys
    }


async def test_other_work_has_its_turn_between_two_slices() -> None:
    chunks: list[OutputChunk] = []
    turns = [0]
    at: list[int] = []

    def tick() -> None:
        turns[0] += 1
        if not (chunks and chunks[-1].is_last):
            asyncio.get_running_loop().call_soon(tick)

    actor = actor_of(chunks)

    def deliver(chunk: OutputChunk) -> None:
        chunks.append(chunk)
        at.append(turns[0])

    actor._deliver = deliver
    actor.start(lambda name, error: pytest.fail(f"{name} {error}"))
    tick()
    for event in events_of(num_tokens=1000):
        actor.inbox.send(event)
    async with asyncio.timeout(60):
        while not (chunks and chunks[-1].is_last):
            ticked = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_soon(ticked.set_result, None)
            await ticked
    await actor.stop()
    assert len(at) > 4
    assert len(set(at)) == len(at), "each chunk came in a turn of its own"


async def test_a_result_can_launch_the_next_step_before_all_text_is_sent() -> None:
    """Slices have a bounded number of chunks, and what came for a request since its last turn is
    one chunk.
    """
    num_requests, num_steps = 50, 3
    loop = asyncio.get_running_loop()
    turns, turn_of, chunks = [0], list[int](), list[OutputChunk]()

    def tick() -> None:
        turns[0] += 1
        loop.call_soon(tick)

    def deliver(chunk: OutputChunk) -> None:
        chunks.append(chunk)
        turn_of.append(turns[0])

    actor = actor_of(chunks)
    actor._deliver = deliver
    actor.start(lambda name, error: pytest.fail(f"{name} {error}"))
    for number in range(num_requests):
        actor.inbox.send(OpenText(f"r{number}", 3, SamplingParams(seed=1)))
    for step in range(num_steps):
        outputs = [
            SequenceOutput(f"r{number}", 0, step, pack_i32([9]), 3)
            for number in range(num_requests)
        ]
        actor.inbox.send(StepOutput(step, tuple(outputs)))
    tick()
    async with asyncio.timeout(60):
        while len(chunks) < num_requests:
            await yield_to_loop()
    await actor.stop()
    assert [len(array_i32(chunk.token_ids)) for chunk in chunks] == [num_steps] * num_requests
    sizes = Counter(turn_of)
    assert max(sizes.values()) == MAX_SCORES // CHUNK_SCORES
    gaps = [after - before for before, after in itertools.pairwise(sizes)]
    assert gaps, "it took more than one slice"
    assert min(gaps) >= NUM_LAUNCH_ROUNDS
