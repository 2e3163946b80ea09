"""An engine of `aserve bench speculate`, which decodes batches in a process of its own.

WHY not one process: an engine that is loaded later into the same process is up to 6 % slower. While
it is not an engine's turn, its process waits for a message and takes no time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import sys
from collections.abc import Mapping, Sequence
from subprocess import PIPE, Popen
from typing import IO, TypeVar

import msgspec

from aserve.bench.options import SpeculateOptions
from aserve.bench.result import median, progress
from aserve.bench.step_driver import StepDriver, StepTime, running
from aserve.config import Resolved
from aserve.errors import BugError, ConfigError
from aserve.frames import receive, send
from aserve.host.environment import prepare_process
from aserve.host.threads import new_event_loop
from aserve.load import load
from aserve.measure_steps import measure_steps, warm_up
from aserve.messages.base import pack_i32
from aserve.messages.requests import AdmitRequest, SamplingParams
from aserve.messages.results import StepTimes
from aserve.messages.step import DraftTree
from aserve.scheduling.step_times import WindowTimes
from aserve.text.tokenizer import TextTokenizer

T = TypeVar("T")

MODULE = "aserve.bench.speculate_engine"
STORIES = "stories"
HEROES = ("hen", "Leo"), ("pig", "Anna"), ("squirrel", "Rose"), ("bear", "Ivy"), ("cat", "Noah")
OPENINGS = tuple(f"Once upon a time, there was a {kind} named {name}." for kind, name in HEROES)
NAMES = ("Anna", "Ben", "Ivy", "Leo", "Max", "Mia", "Noah", "Olga", "Omar", "Rose", "Sam", "Tom")
CITIES = ("Lagos", "Oslo", "Denver", "Boston", "New York")
FUNCTIONS = (
    ("add", "the sum of a and b", "a + b"),
    ("is_equal", "true if a equals b", "a == b"),
    ("multiply", "the product of a and b", "a * b"),
    ("power", "a to the power of b", "a ** b"),
    ("remainder", "the remainder of a divided by b", "a % b"),
    ("contains", "true if b is in a", "b in a"),
    ("divide", "a divided by b", "a / b"),
)


class Setup(msgspec.Struct, frozen=True):
    options: SpeculateOptions
    resolved: Resolved


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine is loaded. `times` are those of its steps, if it drafts."""

    about: str
    max_rows: int
    tree: DraftTree | None
    times: StepTimes | None


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    message: str


class Loaded(msgspec.Struct, frozen=True):
    result: Ready | LoadFailed


class Turn(msgspec.Struct, frozen=True):
    num_rows: int
    repeat: int


class Run(msgspec.Struct, frozen=True):
    """One batch's decoding by one engine."""

    decode_s: float
    num_tokens: int
    step_s: float  # the median step
    num_decodes: int  # rows of all steps
    windows: tuple[tuple[int, int], ...]  # drafts, and tokens that came of them

    @property
    def rate(self) -> float:
        return self.num_tokens / self.decode_s


class SpeculateEngine:
    """The benchmark's handle of an engine's process. Its calls block."""

    def __init__(self, options: SpeculateOptions, resolved: Resolved) -> None:
        """Starts the process and waits until it is loaded."""
        command = (sys.executable, "-m", MODULE)
        # In a group of its own it hears nothing of a Ctrl-C, which ends the parent.
        self._process = Popen(command, stdin=PIPE, stdout=PIPE, process_group=0)
        result = self._ask(Setup(options, resolved), Loaded).result
        if isinstance(result, LoadFailed):
            raise ConfigError(result.message)
        self.ready = result

    @property
    def times(self) -> WindowTimes:
        ready = self.ready
        assert ready.times is not None
        return WindowTimes(ready.times, max_rows=ready.max_rows, tree=ready.tree)

    def run(self, turn: Turn) -> Run:
        return self._ask(turn, Run)

    def close(self) -> None:
        self._process.communicate()  # the end of its stdin ends it

    def _ask(self, message: msgspec.Struct, kind: type[T]) -> T:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        send(self._process.stdin, message)
        reply = receive(self._process.stdout, kind)
        if reply is None:
            raise BugError(f"an engine's process ended with {self._process.wait()}")
        return reply


def run_in_turns(
    engines: Mapping[str, SpeculateEngine], counts: Sequence[int], *, repeats: int, title: str
) -> dict[int, dict[str, list[Run]]]:
    """Returns each engine's runs by number of rows, of which the first warms up. Every second time
    the engines run in the opposite order."""
    found: dict[int, dict[str, list[Run]]] = {
        num_rows: {name: [] for name in engines} for num_rows in counts
    }
    orders = [*engines], [*engines][::-1]
    turns = [
        (Turn(num_rows, repeat), name)
        for repeat in range(repeats + 1)
        for num_rows in counts
        for name in orders[repeat % 2]
    ]
    with progress(title, len(turns)) as done:
        for turn, name in turns:
            found[turn.num_rows][name].append(engines[name].run(turn))
            done()
    return found


def main() -> None:
    turns, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # so that output of a library is not taken for a reply
    setup = receive(turns, Setup)
    if setup is None:
        return
    prepare_process(setup.resolved.machine.threads)
    has_gone = contextlib.suppress(BrokenPipeError)  # the parent
    with has_gone, asyncio.Runner(loop_factory=new_event_loop) as runner:
        try:
            runner.run(_serve(setup, turns, replies))
        except ConfigError as error:
            send(replies, Loaded(LoadFailed(str(error))))


async def _serve(setup: Setup, turns: IO[bytes], replies: IO[bytes]) -> None:
    """Blocks the loop between two turns, when no step is in flight."""
    options, loaded = setup.options, load(setup.resolved)
    asked = _asked(options, loaded.text.tokenizer)
    executor, spec = loaded.executor, loaded.executor.spec
    driver = StepDriver(executor)
    async with running(executor):
        events = await warm_up(executor)
        driver.prepare(events)
        times = events[0] if events else None
        if times is None and setup.resolved.speculative.speculative_algorithm is not None:
            times = await measure_steps(executor)
        ready = Ready(executor.about, spec.max_rows, spec.decode.tree, times)
        send(replies, Loaded(ready))
        while (turn := receive(turns, Turn)) is not None:
            requests = requests_of(asked, turn.num_rows, turn.repeat)
            send(replies, summarize(await driver.run(requests)))


def _asked(options: SpeculateOptions, tokenizer: TextTokenizer) -> list[AdmitRequest]:
    texts = (options.prompt,) if options.prompt else prompts_of(options.task)
    sampling = SamplingParams(
        seed=0, temperature=options.temperature, max_tokens=options.output_len
    )
    # Stories go on; what repeats its prompt is over at its end.
    ends = () if options.task == STORIES else tuple(tokenizer.eos_ids)
    prompts = [pack_i32(tokenizer.encode(text, with_special=True)) for text in texts]
    return [AdmitRequest("", prompt, sampling, end_ids=ends) for prompt in prompts]


def prompts_of(task: str) -> tuple[str, ...]:
    """Returns the prompts of a task, in the notations that the bundled model knows: a list of names
    that goes on as before, a JSON array of equal records, or functions that are written once more.
    """
    make = {"recall": _names, "json": _records, "code": _functions}.get(task)
    return OPENINGS if make is None else tuple(make(number) for number in range(len(OPENINGS)))


def _names(number: int) -> str:
    line = ", ".join(random.Random(number).choices(NAMES, k=20))
    return f"{line}\n{line}\n"


def _records(number: int) -> str:
    record = json.dumps({"name": "Tess", "age": 6, "city": CITIES[number]})
    return f'[{record}, {record}, {{"name": "'


def _functions(number: int) -> str:
    chosen = (*FUNCTIONS[:2], FUNCTIONS[2 + number])
    source = "".join(
        f'def {name}(a, b):\n    """Return {about}."""\n    return {value}\n\n'
        for name, about, value in chosen
    )
    return f"{source}{source}def {FUNCTIONS[0][0]}("


def requests_of(asked: Sequence[AdmitRequest], num_rows: int, repeat: int) -> list[AdmitRequest]:
    """Returns these requests in turn, one for each row."""
    chosen = (asked[(number + repeat) % len(asked)] for number in range(num_rows))
    return [
        msgspec.structs.replace(
            one,
            request_id=f"row-{number}",
            sampling=msgspec.structs.replace(one.sampling, seed=number),
            # A drafter may not remember what earlier repeats answered to the same prompts.
            namespace=f"{num_rows} rows, repeat {repeat}",
        )
        for number, one in enumerate(chosen)
    ]


def summarize(times: Sequence[StepTime]) -> Run:
    last_prefill = max(number for number, step in enumerate(times) if step.stats.num_prefill_tokens)
    decoding = times[last_prefill + 1 :]
    ends = [times[last_prefill].done_s, *(step.done_s for step in decoding)]
    took = [end - start for start, end in itertools.pairwise(ends)]
    return Run(
        decode_s=sum(took),
        num_tokens=sum(step.num_tokens for step in decoding),
        step_s=median(took),
        num_decodes=sum(step.stats.num_decode_rows for step in decoding),
        windows=tuple(window for step in decoding for window in step.windows),
    )


if __name__ == "__main__":
    main()
