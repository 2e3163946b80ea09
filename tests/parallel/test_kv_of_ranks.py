"""KV travels between engines of different numbers of ranks, each of which has some of the heads."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aserve.disagg.connect import HasKv
from aserve.engine_core import LocalExecutor
from aserve.errors import ConfigError
from aserve.gpu.executor import TorchExecutor
from aserve.messages.base import pack_i32
from aserve.messages.transfers import LayeredKvAccess
from aserve.parallel import kv_moves
from aserve.parallel.leader import ParallelExecutor
from tests.gpu.drive import request, serve_between
from tests.parallel.test_rank_traces import RankThread, joined
from tests.parallel.test_ranks import loaded, pid_of, resolved_of

OPTIONS: dict[str, Any] = {"speculative_algorithm": "EAGLE3", "num_pages": 20, "page_size": 4}
PROMPT = [*range(5, 16)]
LENGTH = len(PROMPT) - 1
OTHER_PAGES = (pack_i32([17, 14, 15]),)


def access_of(executor: LocalExecutor) -> LayeredKvAccess:
    assert isinstance(executor, HasKv)
    return executor.kv_access()


async def computed(executor: LocalExecutor) -> bytes:
    """Computes the prompt, and returns the KV of its tokens."""
    executor.start(asyncio.get_running_loop())
    asked = [request("r", PROMPT, max_tokens=1)]
    served = await serve_between(executor, asked, first_iteration=1)
    pages = tuple(writes.pages for writes in served.batches[0].page_writes)
    return await read(access_of(executor), pages)


async def read(access: LayeredKvAccess, pages: tuple[bytes, ...], from_layer: int = 0) -> bytes:
    return bytes((await asyncio.wrap_future(access.read(pages, 0, LENGTH, from_layer)))())


@pytest.mark.parametrize("num_ranks", [2, 4])
async def test_kv_of_ranks_is_that_of_one_device(num_ranks: int, tmp_path: Path) -> None:
    """The model has two KV heads, so of four ranks two share each. Each has the whole drafter."""
    resolved = resolved_of(tensor_parallel_size=num_ranks, **OPTIONS)
    one, many = loaded(**OPTIONS), joined(resolved, tmp_path / "store", kv_parts=2)
    try:
        expected, found = await computed(one), await computed(many)
        access = access_of(many)
        assert access.geometry == access_of(one).geometry
        assert len(found) == LENGTH * access.bytes_per_token
        assert np.frombuffer(found) == pytest.approx(np.frombuffer(expected), rel=1e-9, abs=1e-12)
        middle = LENGTH * sum(access.layer_bytes[:2])
        num_layers = len(access.layer_bytes)
        parts = {range(2): expected[:middle], range(2, num_layers): expected[middle:]}
        for layers, values in parts.items():
            ids, given = pack_i32(PROMPT[:LENGTH]), memoryview(bytearray(values))
            await asyncio.wrap_future(access.write(OTHER_PAGES, 0, ids, given, layers))
        assert await read(access, OTHER_PAGES) == expected
        assert await read(access, OTHER_PAGES, from_layer=2) == expected[middle:]
        held = [many._own, *(rank.executor for rank in many.ranks if isinstance(rank, RankThread))]
        own = [await read(access_of(each), OTHER_PAGES) for each in held]
        assert len(set(own)) == 2
        assert own == [own[rank * 2 // num_ranks * num_ranks // 2] for rank in range(num_ranks)]
        for rank, (executor, values) in enumerate(zip(held, own, strict=True)):
            await check_order(executor, values, writes_beside_steps=rank == 0)
        bad = access.read((pack_i32([99]),), 0, 1)
        with pytest.raises(RuntimeError, match="IndexError"):
            await asyncio.wrap_future(bad)
    finally:
        one.close()
        await asyncio.to_thread(many.close)
    assert not many._moves


async def check_order(executor: LocalExecutor, values: bytes, *, writes_beside_steps: bool) -> None:
    """Other ranks may compute drafts of steps whose results rank 0 already has."""
    assert isinstance(executor, TorchExecutor)
    goes_on = threading.Event()

    def step() -> None:
        goes_on.wait(10)

    executor._threads.jobs.put(step)
    ids, given = pack_i32(PROMPT[:LENGTH]), memoryview(bytearray(values))
    written = executor.kv_access().write(OTHER_PAGES, 0, ids, given)
    assert written.done() == writes_beside_steps
    goes_on.set()
    await asyncio.wrap_future(written)


async def test_a_rank_that_hangs_before_it_has_moved_kv_ends_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request that awaits its KV is in no step that would miss the rank."""
    monkeypatch.setattr(kv_moves, "MOVE_S", 1.0)
    executor = loaded(
        tensor_parallel_size=2,
        disaggregation_mode="prefill",
        disaggregation_key="secret",
        **OPTIONS,
    )
    assert isinstance(executor, ParallelExecutor)
    executor.start(asyncio.get_running_loop())
    os.kill(pid_of(executor.ranks[0]), signal.SIGSTOP)
    try:
        async with asyncio.timeout(10):
            with pytest.raises(RuntimeError, match="rank 1 has not moved KV in 1 s"):
                await read(access_of(executor), OTHER_PAGES)
    finally:
        await asyncio.to_thread(executor.close)
    assert executor.died.done()


async def test_kv_of_data_parallel_ranks_is_refused(tmp_path: Path) -> None:
    resolved = resolved_of(enable_dp_attention=True, replicas=2)
    executor = joined(resolved, tmp_path / "store")
    executor.start(asyncio.get_running_loop())
    with pytest.raises(ConfigError, match="not with stages or data-parallel ranks"):
        access_of(executor)
    await asyncio.to_thread(executor.close)
