"""The library with its real worker processes: each grammar once, each within its limits."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from aserve.config import GrammarOptions
from aserve.errors import AserveError, BugError, InvalidRequest, QueueFull, ShuttingDown
from aserve.frames import send
from aserve.grammar import library, source_limits
from aserve.grammar.process import CompileProcess
from aserve.grammar.worker import Job, Setup
from aserve.grammar.workers import USABLE_S
from aserve.messages.requests import Grammar
from tests.grammar.libraries import MIB, Rig, rig, vocabulary

pytestmark = pytest.mark.slow  # a worker's imports take seconds

# Small to compile; every letter of an output multiplies the ways to read it.
EXPLODING = "(((((a?){50}){50}){50}){50}){50}"
HUGE = "|".join(f"(.*x{i}.*)" for i in range(3000))


@pytest.fixture(scope="module")
def shared() -> Iterator[Rig]:
    """Workers that are ready, for tests that leave them so."""
    with rig(timeout_s=3.0, memory_bytes=24 * MIB) as made:
        yield made


@pytest.fixture(scope="module")
def single() -> Iterator[Rig]:
    """One worker, for tests that leave it ready, or let the next one start."""
    with rig(timeout_s=100.0, num_workers=1) as made:
        yield made


@pytest.fixture(scope="module")
def mortal() -> Iterator[Rig]:
    """One worker that may be killed; what it has forked then ends by itself, soon."""
    with rig(timeout_s=2.0, num_workers=1) as made:
        yield made


def forks_of(made: Rig) -> list[int]:
    """Processes that compile now, of workers that live."""
    leaders = [worker._process.pid for worker in made.library._workers._all]
    paths = [Path(f"/proc/{pid}/task/{pid}/children") for pid in leaders]
    return [int(pid) for path in paths if path.exists() for pid in path.read_text().split()]


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "gone"


async def code_of(made: Rig, grammar: Grammar) -> str:
    with pytest.raises(AserveError) as caught:
        await made.library.compiled(grammar)
    return caught.value.error_code


async def test_the_same_grammar_asked_for_at_once_and_later_is_compiled_once(shared: Rig) -> None:
    before = shared.count("compiles", outcome="ok")
    asked = [shared.library.compiled(Grammar("regex", "once+")) for _ in range(5)]
    gone = asyncio.ensure_future(shared.library.compiled(Grammar("regex", "once+")))
    await asyncio.sleep(0)
    gone.cancel()  # that takes the grammar from nobody
    compiled = await asyncio.gather(*asked)
    compiled.append(await shared.library.compiled(Grammar("regex", "once+")))
    assert all(one is compiled[0] for one in compiled)
    assert shared.count("compiles", outcome="ok") == before + 1
    assert shared.count("cache_hits") >= 5


async def test_an_exploding_grammar_ends_at_its_limit(shared: Rig) -> None:
    assert await code_of(shared, Grammar("regex", EXPLODING)) == "grammar_timeout"
    assert shared.count("compiles", outcome="grammar_timeout") == 1


async def test_a_grammar_that_takes_long_delays_no_other() -> None:
    with rig(timeout_s=100.0) as made:
        long = asyncio.create_task(made.library.compiled(Grammar("regex", EXPLODING)))
        plain = (made.library.compiled(Grammar("regex", f"plain{number}")) for number in range(3))
        await asyncio.gather(*plain)
        assert not long.done()
        long.cancel()


async def test_a_failure_is_known_without_compiling_again(shared: Rig) -> None:
    grammar = Grammar("regex", "((")
    assert [await code_of(shared, grammar) for _ in range(2)] == ["invalid_grammar"] * 2
    assert shared.count("compiles", outcome="invalid_grammar") == 1


async def test_a_grammar_that_takes_too_much_memory_is_refused(shared: Rig) -> None:
    assert await code_of(shared, Grammar("regex", HUGE)) == "grammar_out_of_memory"
    await shared.library.compiled(Grammar("regex", "after"))


async def test_what_is_too_large_or_too_deep_is_refused_before_any_work(single: Rig) -> None:
    deep = '{"items":' * 70 + "{}" + "}" * 70
    text = '{"const": "' + "[" * 200 + '"}'
    with rig(num_workers=1) as made:
        long = Grammar("regex", "a" * (source_limits.MAX_SOURCE + 1))
        assert await code_of(made, long) == "string_above_max_length"
        assert await code_of(made, Grammar("json_schema", deep)) == "schema_too_deep"
        assert made.library._workers._all == set()
    await single.library.compiled(Grammar("json_schema", text))  # a text has no depth


async def test_more_grammars_than_may_wait_are_refused_for_now(
    monkeypatch: pytest.MonkeyPatch, shared: Rig
) -> None:
    monkeypatch.setattr(library, "MAX_PENDING", 1)
    first = asyncio.ensure_future(shared.library.compiled(Grammar("regex", "first")))
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await shared.library.compiled(Grammar("regex", "second"))
    assert await first is not None
    await shared.library.compiled(Grammar("regex", "second"))


def oom_score(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


async def fork_at_work(made: Rig) -> int:
    async with asyncio.timeout(30):
        while not (forks := forks_of(made)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return forks[0]


@pytest.mark.parametrize(
    ("number", "is_fork"),
    [(signal.SIGKILL, True), (signal.SIGKILL, False), (signal.SIGTERM, False)],
    ids=["fork", "worker", "otherwise"],
)
async def test_a_worker_that_ends_fails_its_grammar_alone_and_says_why(
    mortal: Rig, number: signal.Signals, is_fork: bool
) -> None:
    """The system kills the one that compiles for its memory, or the worker that it was forked from;
    another end is a bug."""
    own = EXPLODING.replace("50", str(40 + number + is_fork), 1)  # a failure is remembered
    grammar = Grammar("regex", own)
    asked = asyncio.ensure_future(mortal.library.compiled(grammar))
    fork = await fork_at_work(mortal)
    async with asyncio.timeout(60):
        while oom_score(fork) != 1000:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    (worker,) = mortal.library._workers._all
    os.kill(fork if is_fork else worker._process.pid, number)
    if number == signal.SIGKILL:
        with pytest.raises(InvalidRequest, match="memory runs out") as caught:
            await asked
        assert caught.value.error_code == "grammar_out_of_memory"
    else:
        with pytest.raises(BugError, match="exit code -15"):
            await asked
    await mortal.library.compiled(Grammar("regex", f"after{number.name}{is_fork}"))


async def test_a_grammar_that_nobody_waits_for_is_not_compiled_on(single: Rig) -> None:
    """Its worker is not lost with it, and what waits behind it goes on."""
    library, num_before = single.library, single.count("compiles", outcome="ok")
    asked = asyncio.ensure_future(library.compiled(Grammar("regex", EXPLODING)))
    queued = asyncio.ensure_future(library.compiled(Grammar("regex", "queued")))
    await fork_at_work(single)
    (worker,) = library._workers._all
    queued.cancel()
    asked.cancel()
    await asyncio.wait([asked, queued])
    assert library._pending == {}
    await library.compiled(Grammar("regex", "next"))
    assert library._workers._all == {worker}
    assert worker.is_alive
    num_compiled = single.count("compiles", outcome="ok") - num_before
    assert num_compiled == 1, "only the last one was compiled"


async def test_a_clients_exploding_grammars_delay_no_other_client(single: Rig) -> None:
    sources = [EXPLODING.replace("50", str(count), 1) for count in range(51, 55)]
    flood = [
        asyncio.ensure_future(single.library.compiled(Grammar("regex", source), client="flood"))
        for source in sources
    ]
    await fork_at_work(single)
    for number in range(3):
        await single.library.compiled(Grammar("regex", f"honest{number}"), client="other")
    assert not any(each.done() for each in flood), "in order of arrival all were first"
    for each in flood:
        each.cancel()
    await asyncio.wait(flood)


async def test_a_client_may_not_fill_the_queue_of_all(
    monkeypatch: pytest.MonkeyPatch, shared: Rig
) -> None:
    monkeypatch.setattr(library, "MAX_PER_CLIENT", 2)
    compiled = shared.library.compiled
    asked = [asyncio.ensure_future(compiled(Grammar("regex", n), client="a")) for n in "xy"]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match="2 grammars of this client"):
        await compiled(Grammar("regex", "z"), client="a")
    await compiled(Grammar("regex", "z"), client="b")
    await asyncio.gather(*asked)


async def test_a_schema_with_five_hundred_texts_compiles_within_the_default_limits() -> None:
    options = GrammarOptions()
    names = [f"field_{i}" for i in range(500)]
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}}
    with rig(timeout_s=options.grammar_timeout, memory_bytes=options.grammar_memory) as made:
        for wanted in (schema, schema | {"required": names}):
            usable = await made.library.compiled(Grammar("json_schema", json.dumps(wanted)))
            assert usable.memory_size_bytes < 16 * MIB


async def test_closing_ends_what_is_being_compiled_and_every_process_and_thread() -> None:
    before = set(threading.enumerate())
    with rig(timeout_s=100.0) as made:
        asked = asyncio.ensure_future(made.library.compiled(Grammar("regex", EXPLODING)))
        fork = await fork_at_work(made)
        began_s = time.monotonic()
        made.library.close()
        assert time.monotonic() - began_s < 50, "the grammar's own limit is 100 seconds"
        with pytest.raises(AserveError):
            await asked
    async with asyncio.timeout(60):  # the kernel takes a killed process away in its own time
        while state_of(fork) not in ("gone", "Z", "X"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert set(threading.enumerate()) <= before


async def test_without_xgrammar_a_grammar_is_refused_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with rig() as made:
        assert await code_of(made, Grammar("regex", "a")) == "grammar_unavailable"


async def test_a_worker_that_was_idle_for_long_is_not_given_a_job_that_may_meet_its_end() -> None:
    with rig(num_workers=1) as made:
        workers = made.library._workers
        await made.library.compiled(Grammar("regex", "first"))
        (first,) = workers._all
        made.now_s += USABLE_S - 1
        await made.library.compiled(Grammar("regex", "soon"))
        assert workers._all == {first}
        made.now_s += USABLE_S
        await made.library.compiled(Grammar("regex", "late"))
        (second,) = workers._all
        assert second is not first
        assert not first.is_alive


async def test_a_worker_that_was_started_early_gets_the_first_grammar_however_late() -> None:
    with rig(num_workers=1) as made:
        early = CompileProcess()
        await made.library.adopt(early)
        assert (early.stays, made.stages) == (True, ["started"])
        made.now_s += 2 * USABLE_S
        await made.library.compiled(Grammar("regex", "first"))
        assert made.library._workers._all == {early}


async def test_without_workers_there_is_no_structured_output() -> None:
    with rig(num_workers=0) as made:
        assert await code_of(made, Grammar("regex", "a")) == "unsupported_value"
        assert made.library._workers._all == set()


def test_a_worker_that_was_closed_before_it_is_asked_says_that_the_server_ends() -> None:
    """Its pipes are closed: to write to them was an error that nobody expected, in the log."""
    worker = CompileProcess()
    worker.close()
    with pytest.raises(ShuttingDown):
        worker.get_ready(Setup(vocabulary(), 20.0, 256 * MIB, idle_s=0))


def test_a_worker_whose_server_was_killed_ends_in_silence(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """It holds the server's output open for as long as it lives."""
    worker = CompileProcess()
    worker.get_ready(Setup(vocabulary(), 0.2, 256 * MIB, idle_s=0))
    send(worker._jobs, Job(Grammar("regex", EXPLODING)))
    worker._replies.close()
    worker._jobs.close()
    assert worker._process.wait(timeout=50) == 0
    assert "Traceback" not in capfd.readouterr().err
    worker.close()


def test_a_worker_that_gets_no_job_ends_by_itself() -> None:
    worker = CompileProcess()
    worker.get_ready(Setup(vocabulary(), 20.0, 256 * MIB, idle_s=0.1))
    worker.try_out(Grammar("regex", "once"))
    assert worker._process.wait(timeout=20) == -signal.SIGALRM
    worker.close()
