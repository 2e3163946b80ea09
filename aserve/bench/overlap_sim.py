"""`aserve bench overlap-sim` measures the share of time in which the host keeps a device busy.

The device only sleeps, so it can have any speed. Everything else is real: actors, text, and with
HTTP also the server, with streaming clients in another process. Busy is (time asleep) / (time from
the first start to the last wake).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import itertools
import sys
import tempfile
from asyncio.subprocess import PIPE, create_subprocess_exec
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import msgspec

from aserve.bench.options import OverlapSimOptions, integers, numbers
from aserve.bench.result import BenchResult, Table, median, progress, spread
from aserve.bench.sleeping_engine import Nap, Settings, SleepingExecutor, command
from aserve.bench.windows import TokenWindows
from aserve.config import Resolved
from aserve.engine import Engine
from aserve.errors import BugError, ConfigError
from aserve.frontend import Frontend
from aserve.host.threads import new_event_loop
from aserve.load import Loaded
from aserve.messages.base import array_i32
from aserve.messages.executor import EngineSpec, GroupSpec
from aserve.server import connect_http
from aserve.startup import InItsOwnProcess, InThisProcess, Launcher, Waits
from aserve.text.load import TextSide, load_tokenizer
from aserve.tiny import MODEL_DIR

TITLE = "share of time in which the device is busy"
PROMPT_LEN = 16
PAGE_SIZE = 16
MAX_BATCHED_TOKENS = 8192
NOTE = (
    "busy is (time asleep) / (first start to last wake); gap is from a wake to the next start. "
    "http: streaming clients in another process on the same machine."
)


@dataclass(frozen=True, slots=True)
class Case:
    """One setting. `depth` is the number of steps in flight. `processes` is the number of server
    processes, or 0 for the embedded engine.
    """

    step_ms: float
    num_rows: int
    depth: int
    processes: int

    @property
    def key(self) -> str:
        return f"{self.step_ms:g}ms/{self.num_rows}"

    @property
    def series(self) -> str:
        where = ("", "_http", "_two_processes")[self.processes]
        return "busy" + where + "_depth1" * (self.depth == 1)


Run: TypeAlias = tuple[int, Sequence[Nap]]  # the number of output tokens, and the device's steps


@dataclass(frozen=True, slots=True)
class Measured:
    """The figures of one run. `gap_us` is the median time from a wake to the next start."""

    busy: float
    gap_us: float
    num_steps: int


def run(options: OverlapSimOptions, resolved: Resolved) -> BenchResult:
    cases = [
        Case(step_ms, num_rows, depth, processes)
        for processes in (0, *server_processes(options))
        for depth in (2, 1)
        for step_ms in numbers(options.step_ms, flag="--step-ms")
        for num_rows in integers(options.rows, flag="--rows")
    ]
    found: dict[Case, list[Measured]] = {case: [] for case in cases}
    simulation = Simulation(resolved, options)
    runs = cases * options.repeats
    with asyncio.Runner(loop_factory=new_event_loop) as runner, progress(TITLE, len(runs)) as done:
        for case in runs:
            found[case].append(summarize(runner.run(simulation.naps(case))))
            done()
    figures: dict[str, dict[str, float]] = {case.series: {} for case in cases}
    for case, repeats in found.items():
        figures[case.series][case.key] = round(median([one.busy for one in repeats]), 4)
    return BenchResult({**figures, "details": _details(found)}, (_table(found),), (NOTE,))


def server_processes(options: OverlapSimOptions) -> tuple[int, ...]:
    """Returns the numbers of server processes to measure."""
    if options.no_http:
        return ()
    counts = integers(options.processes, flag="--processes")
    if max(counts) > 2:
        raise ConfigError(f"--processes {options.processes}: must be 1, 2 or 1,2")
    return counts


def summarize(naps: Sequence[Nap]) -> Measured:
    asleep_s = sum(nap.wake_s - nap.start_s for nap in naps)
    gaps_s = [after.start_s - before.wake_s for before, after in itertools.pairwise(naps)]
    wall_s = naps[-1].wake_s - naps[0].start_s
    return Measured(asleep_s / wall_s, median(gaps_s) * 1e6, len(naps))


class Simulation:
    """Runs loads with as many streams as rows, all of the same length."""

    def __init__(
        self,
        resolved: Resolved,
        options: OverlapSimOptions,
        *,
        beside: Callable[[str], AbstractAsyncContextManager[None]] | None = None,
    ) -> None:
        """`beside` is entered with a server's address while its clients run."""
        self._beside = beside or (lambda _: contextlib.nullcontext())
        self._resolved = resolved
        self._num_tokens = options.steps
        self._tokenizer = load_tokenizer(MODEL_DIR)
        self._windows = TokenWindows(self._tokenizer, seed=0)

    async def naps(self, case: Case) -> Sequence[Nap]:
        """Runs one load and returns the device's steps. Long-lived objects are frozen for the
        garbage collector, as in the server.
        """
        run_load = (self._embed, self._serve, self._serve_two_processes)[case.processes]
        gc.collect()
        gc.freeze()
        try:
            num_tokens, naps = await run_load(case, _resolved_for(case, self._resolved))
        finally:
            gc.unfreeze()
        if num_tokens != case.num_rows * self._num_tokens:
            expected = f"{case.num_rows} x {self._num_tokens}"
            raise BugError(f"{case.key}: got {num_tokens} tokens instead of {expected}")
        return naps

    async def _embed(self, case: Case, resolved: Resolved) -> Run:
        executor, loaded = self._loaded(case)
        async with Engine(resolved, loader=lambda _: loaded) as engine:

            async def read(prompt: list[int]) -> int:
                chunks = engine.generate(prompt, max_tokens=self._num_tokens, ignore_eos=True)
                return sum([len(array_i32(chunk.token_ids)) async for chunk in chunks])

            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(read(self._windows.ids(PROMPT_LEN)))
                    for _ in range(case.num_rows)
                ]
        return sum(task.result() for task in tasks), executor.naps

    async def _serve(self, case: Case, resolved: Resolved) -> Run:
        executor, loaded = self._loaded(case)
        num_tokens = await self._load_server(case, resolved, InThisProcess(lambda *_: loaded))
        return num_tokens, executor.naps

    async def _serve_two_processes(self, case: Case, resolved: Resolved) -> Run:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "naps"
            settings = Settings(self._spec(case), case.step_ms / 1e3, str(path))
            launcher = InItsOwnProcess(command(settings))
            num_tokens = await self._load_server(case, resolved, launcher)
            return num_tokens, msgspec.json.decode(path.read_bytes(), type=list[Nap])

    def _loaded(self, case: Case) -> tuple[SleepingExecutor, Loaded]:
        executor = SleepingExecutor(self._spec(case), step_s=case.step_ms / 1e3)
        return executor, Loaded(executor, TextSide(self._tokenizer))

    async def _load_server(self, case: Case, resolved: Resolved, launcher: Launcher) -> int:
        frontend = Frontend(resolved)
        http = connect_http(frontend)
        address = await http.start()
        try:
            await launcher.launch(frontend, Waits())
            async with self._beside(address):
                return await self._load_from_outside(address, num_clients=case.num_rows)
        finally:
            await http.stop()
            await frontend.close()

    async def _load_from_outside(self, address: str, *, num_clients: int) -> int:
        count = str(num_clients)
        arguments = (
            *("--url", address, "--num-prompts", count, "--max-concurrency", count),
            *("--input-len", str(PROMPT_LEN), "--output-len", str(self._num_tokens)),
            *("--num-warmups", "0", "--repeats", "1"),
        )
        clients = (sys.executable, "-m", "aserve", "bench", "serve", *arguments)
        process = await create_subprocess_exec(*clients, stdout=PIPE, stderr=PIPE)
        output, errors = await process.communicate()
        if process.returncode:
            raise BugError(f"the clients ended with {process.returncode}: {errors.decode()[-500:]}")
        return msgspec.json.decode(output.splitlines()[-1], type=_Counted).total_output_tokens

    def _spec(self, case: Case) -> EngineSpec:
        """There are rows and pages for all requests, so none waits and none is retracted."""
        max_len = 2 * PROMPT_LEN + self._num_tokens
        num_pages = 1 + case.num_rows * (max_len // PAGE_SIZE + 2)
        return EngineSpec(
            page_size=PAGE_SIZE,
            groups=(GroupSpec("full", num_pages),),
            max_rows=case.num_rows,
            max_model_len=max_len,
            max_batched_tokens=MAX_BATCHED_TOKENS,
            vocab_size=self._tokenizer.vocab_size,
            depth=case.depth,
            lead=case.depth,
            prefix_cache=False,
        )


class _Counted(msgspec.Struct):
    total_output_tokens: int


def _resolved_for(case: Case, resolved: Resolved) -> Resolved:
    return dataclasses.replace(
        resolved,
        scheduler=dataclasses.replace(resolved.scheduler, max_num_seqs=case.num_rows),
        grammar=dataclasses.replace(resolved.grammar, grammar_workers=0),  # their imports compete
        debug=dataclasses.replace(resolved.debug, log_level=resolved.debug.log_level or "warning"),
        server=dataclasses.replace(
            resolved.server, host="127.0.0.1", port=0, api_key=None, api_key_file=None
        ),
    )


def _details(found: dict[Case, list[Measured]]) -> list[dict[str, object]]:
    return [
        {
            "series": case.series,
            "case": case.key,
            "busy": [round(one.busy, 4) for one in repeats],
            "gap_us": round(median([one.gap_us for one in repeats]), 1),
            "steps": repeats[-1].num_steps,
        }
        for case, repeats in found.items()
    ]


def _table(found: dict[Case, list[Measured]]) -> Table:
    rows = []
    for case, repeats in found.items():
        busy = [one.busy for one in repeats]
        where = ("embedded", "http", "two processes")[case.processes]
        gap_us = median([one.gap_us for one in repeats])
        texts = (f"{median(busy):.3f}", f"{spread(busy):.3f}", f"{gap_us:,.0f}")
        rows.append((where, str(case.depth), case.key, *texts, str(repeats[-1].num_steps)))
    columns = ("where", "depth", "step/rows", "busy", "spread", "gap us", "steps")
    return Table(TITLE, columns, rows)
