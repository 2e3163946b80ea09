"""`aserve bench parallel` compares engines of several processes with one process that has as many
threads: tensor-parallel ranks, each with a part of the threads, and pipeline stages, once in turns
with all threads, and once with a part of the threads and a step in flight for each stage.

Each engine runs in a process of its own (speculate_engine.py). They take turns, every second time
in the opposite order, so that a slow moment of the machine hits all of them. Only decoding is
timed.

The broadcast is what rank 0 does for each step and each other rank: it encodes the plan and writes
it to a socket that another process reads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import IO, cast

from aserve import frames
from aserve.bench.options import ParallelOptions, SpeculateOptions, integers
from aserve.bench.result import BenchResult, Table, median, spread
from aserve.bench.speculate_engine import Run, SpeculateEngine, run_in_turns
from aserve.config import Resolved, SpeculativeOptions
from aserve.host.limits import usable_cpus
from aserve.messages.base import pack_i32
from aserve.messages.step import Launch, ScheduleBatch

TITLE = "several processes over one"
NOTE = "The scheduler and the executor alone: no actors, no text, no HTTP; prefix cache off."
ONE, TENSOR, PIPELINE = "one process", "tensor parallel", "pipeline"
IN_PARTS = "pipeline with a step in each stage"
OTHERS = {TENSOR: "tp", PIPELINE: "pp", IN_PARTS: "pp_in_parts"}
NUM_SENDS = 500


def run(options: ParallelOptions, resolved: Resolved) -> BenchResult:
    counts = integers(options.rows, flag="--rows")
    asked = SpeculateOptions(rows=options.rows, output_len=options.output_len)
    engines: dict[str, SpeculateEngine] = {}
    with contextlib.ExitStack() as stack:
        for name in (ONE, *OTHERS):
            divided = _divided(resolved, name, options.ranks, max_rows=max(counts))
            engines[name] = SpeculateEngine(asked, divided)
            stack.callback(engines[name].close)
        found = run_in_turns(engines, counts, repeats=options.repeats, title=TITLE)
    lines = [_line(num_rows, runs) for num_rows, runs in found.items()]
    table = Table(
        TITLE, list(lines[0]), [[f"{value}" for value in line.values()] for line in lines]
    )
    notes = tuple(f"{name}: {engine.ready.about}" for name, engine in engines.items())
    return BenchResult({"batches": lines}, (table,), (*notes, NOTE))


def _divided(resolved: Resolved, name: str, num_ranks: int, *, max_rows: int) -> Resolved:
    """Returns the settings of an engine. At any time, as many threads compute in all of them."""
    machine, scheduler = resolved.machine, resolved.scheduler
    num_threads = machine.threads or usable_cpus()
    scheduler = dataclasses.replace(scheduler, max_num_seqs=max_rows)
    if name in (TENSOR, IN_PARTS):
        num_threads = max(1, num_threads // num_ranks)
    if name == TENSOR:
        machine = dataclasses.replace(machine, tensor_parallel_size=num_ranks)
    if name in (PIPELINE, IN_PARTS):
        depth = 1 if name == PIPELINE else num_ranks
        machine = dataclasses.replace(machine, pipeline_parallel_size=num_ranks)
        scheduler = dataclasses.replace(scheduler, overlap_depth=depth, overlap_lead=1)
    return dataclasses.replace(
        resolved,
        machine=dataclasses.replace(machine, threads=num_threads),
        scheduler=scheduler,
        kv=dataclasses.replace(resolved.kv, no_prefix_cache=True),
        speculative=SpeculativeOptions(None),
    )


def _line(num_rows: int, runs: Mapping[str, Sequence[Run]]) -> dict[str, float]:
    """The first run of each engine warms up."""
    one = [run.rate for run in runs[ONE][1:]]
    line: dict[str, float] = {"rows": num_rows, "tok_s": round(median(one), 2)}
    for name, key in OTHERS.items():
        ratios = [each.rate / rate for each, rate in zip(runs[name][1:], one, strict=True)]
        line[f"{key}_over_one"] = round(median(ratios), 3)
        line[f"{key}_spread"] = round(spread(ratios), 3)
    return line | {"broadcast_us": round(broadcast_us(num_rows), 1)}


def broadcast_us(num_rows: int) -> float:
    """Returns the median time to send a decode step of so many rows to another process."""
    ours, theirs = socket.socketpair()
    with theirs:
        reader = subprocess.Popen(["cat"], stdin=theirs.fileno(), stdout=subprocess.DEVNULL)
    took_us = []
    with ours, cast(IO[bytes], ours.makefile("wb")) as stream:
        for iteration in range(NUM_SENDS):
            began_s = time.perf_counter()
            frames.send(stream, Launch((_decode_step(iteration, num_rows),)))
            took_us.append((time.perf_counter() - began_s) * 1e6)
    reader.wait()
    return median(took_us)


def _decode_step(iteration: int, num_rows: int) -> ScheduleBatch:
    rows, ones = pack_i32([*range(1, num_rows + 1)]), pack_i32([1] * num_rows)
    return ScheduleBatch(
        iteration=iteration,
        rows=rows,
        query_lens=ones,
        input_ids=pack_i32([-row for row in range(1, num_rows + 1)]),
        next_ids=pack_i32([0] * num_rows),
        kv_lens=pack_i32([100 + iteration] * num_rows),
        bounds=b"",
        expects=pack_i32([iteration - 1] * num_rows),
        sample_rows=rows,
    )
