"""An engine process that is killed: another one goes on, and no client sees a difference."""

from __future__ import annotations

import asyncio
import math
import os
import random
from pathlib import Path
from typing import Any

import pytest

from aserve.http.live_settings import SettingsBody
from aserve.http.probes import health_of, liveness_of
from aserve.messages.base import array_i32, pack_i32
from aserve.messages.changes import LoadLora, LoadWeights, Profile, Sleep, Wake
from aserve.messages.output import OutputChunk
from aserve.messages.requests import AdmitRequest, SamplingParams
from aserve.processes.engine_process import FIRST_DELAY_S, LONGEST_DELAY_S, STABLE_S, Restarts
from tests.fakes.executor import SPEC
from tests.fakes.toy_device import expected_outputs
from tests.processes.test_two_processes import Rig, running

NUM_STREAMS = 64
IS_LARGE = os.environ.get("ASERVE_TEST_PROFILE") == "large"
NUM_KILLS = 100 if IS_LARGE else 2


def tokens_of(chunks: list[OutputChunk]) -> dict[int, list[int]]:
    assert [chunk.is_last for chunk in chunks].count(True) == 1
    children = sorted({chunk.child for chunk in chunks})
    return {
        child: array_i32(
            b"".join(chunk.token_ids for chunk in chunks if chunk.child == child)
        ).tolist()
        for child in children
    }


def expected(**fields: Any) -> dict[int, list[int]]:
    sampling = SamplingParams(**{"max_tokens": 40, "ignore_eos": True} | fields)
    request = AdmitRequest("any", pack_i32([1, 2]), sampling)
    return {child: expected_outputs(request, child, SPEC) for child in range(sampling.n)}


async def until_tokens(rig: Rig, count: float) -> None:
    """Waits until the clients of all time have so many tokens."""
    while (rig.metric("aserve_generation_tokens_total") or 0) < count:  # noqa: ASYNC110
        await asyncio.sleep(0.001)


@pytest.mark.slow
@pytest.mark.timeout(1200 if IS_LARGE else 120)
async def test_kills_at_random_moments_change_no_token_of_64_streams() -> None:
    rng = random.Random(int(os.environ.get("ASERVE_TEST_SEED", "0")))
    fields = [{"seed": i, "n": 2 if i % 8 == 0 else 1} for i in range(NUM_STREAMS)]
    num_tokens = sum(40 * each["n"] for each in fields)
    num_kills = num_rounds = 0
    async with running("steady", max_s=1200, max_restarts=10_000) as rig:
        while num_kills < NUM_KILLS:
            asked = [rig.ask(f"{num_rounds}-{i}", **each) for i, each in enumerate(fields)]
            answers = asyncio.gather(*asked)
            moments = sorted(rng.randrange(num_tokens) for _ in range(2))
            for moment in moments:
                await until_tokens(rig, num_rounds * num_tokens + moment)
                rig.has_restarted.clear()
                rig.process.kill()
                await rig.has_restarted.wait()
                num_kills += 1
            for each, chunks in zip(fields, await answers, strict=True):
                assert tokens_of(chunks) == expected(**each)
            num_rounds += 1
        assert rig.metric("aserve_engine_restarts_total") == num_kills
        num_requests = num_rounds * NUM_STREAMS
        assert rig.metric("aserve_requests_received_total") == num_requests
        labels = {"outcome": "finished", "reason": "length"}
        assert rig.metric("aserve_requests_ended_total", **labels) == num_requests
        assert rig.metric("aserve_requests_in_flight") == 0
        assert rig.metric("aserve_generation_tokens_total") == num_rounds * num_tokens
        assert len(rig.core._journal) == 0


@pytest.mark.slow
async def test_while_the_engine_is_away_the_server_lives_and_requests_wait_or_leave() -> None:
    async with running("steady", max_restarts=1) as rig:
        state = rig.frontend.state
        first = asyncio.ensure_future(rig.ask("first"))
        await until_tokens(rig, 5)
        rig.process.kill()
        while "SIGKILL" not in health_of(state, 300).reason:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert health_of(state, 300).status == "restarting"
        assert liveness_of(state, 300).status == "alive"
        assert state.refusal() is None
        error = await rig.core.run_job(LoadLora(1, 1, "there"))
        assert error is not None
        assert (error.status, error.code) == (503, "engine_dead")
        second = asyncio.ensure_future(rig.ask("second", seed=7))
        leaving = asyncio.ensure_future(rig.ask("leaving"))
        while len(rig.core._journal) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        *_, late = await rig.ask("late", timeout_s=0.001)
        assert late.error is not None
        assert late.error.code == "deadline_exceeded"
        *_, late = await rig.ask("impatient", max_queue_s=0.2)
        assert late.error is not None
        assert late.error.code == "queue_timeout"
        assert "an engine was there" in late.error.message
        assert health_of(state, 300).status == "restarting", "no engine was needed for that"
        rig.frontend.gateway.abort("leaving", error)
        assert (await leaving)[-1].error == error
        assert tokens_of(await first) == expected(seed=1)
        assert tokens_of(await second) == expected(seed=7)
        assert health_of(state, 300).status == "ready"
        assert len(rig.core._journal) == 0


@pytest.mark.slow
async def test_a_server_is_not_ready_while_its_dead_engine_takes_its_time_to_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running("steady", max_restarts=1) as rig:
        state, process, has_ended = rig.frontend.state, rig.core._process, asyncio.Event()
        bury = process.bury

        async def bury_late() -> str:
            await has_ended.wait()
            return await bury()

        monkeypatch.setattr(process, "bury", bury_late)
        rig.process.kill()
        while rig.core.is_up:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert health_of(state, 300).status == "restarting"
        has_ended.set()
        await rig.has_restarted.wait()
        assert rig.metric("aserve_engine_restarts_total") == 1


@pytest.mark.slow
async def test_an_engine_that_is_started_again_has_the_changed_settings() -> None:
    """The first request is refused as too large for the queue, before and after the death."""
    async with running("steady", max_restarts=1) as rig:
        settings = rig.frontend.state.settings
        settings.change(SettingsBody(max_queue=1, max_num_batched_tokens=8))
        wide = {"n": SPEC.max_rows + 2}
        rig.frontend.gateway.capacity = None  # so that the engine itself refuses
        for _ in range(2):
            error = (await rig.ask("wide", **wide))[-1].error
            assert error is not None
            assert error.code == "exceeds_kv_capacity"
            rig.process.kill()
            await rig.has_restarted.wait()


@pytest.mark.slow
async def test_a_request_that_kills_each_engine_ends_with_an_error_and_the_server_goes_on() -> None:
    """Another one dies with it twice, and comes to its end in a trial of its own: each engine makes
    about seven tokens of it.
    """
    async with running("mortal", max_restarts=5) as rig:
        innocent, (*_, last) = await asyncio.gather(
            rig.ask("innocent", max_tokens=16), rig.ask("poison")
        )
        assert tokens_of(innocent) == expected(seed=1, max_tokens=16)
        assert last.error is not None
        assert (last.error.status, last.error.code) == (500, "request_kills_engine")
        assert "request poison was ended" in last.error.message
        assert tokens_of(await rig.ask("small", max_tokens=2)) == expected(seed=1, max_tokens=2)
        assert rig.metric("aserve_engine_restarts_total") == 3


@pytest.mark.slow
async def test_an_engine_that_dies_too_often_ends_the_server_and_says_why() -> None:
    async with running("mortal", max_restarts=1) as rig:
        *_, last = await rig.ask("a")
        assert last.error is not None
        assert (last.error.status, last.error.code) == (503, "engine_dead")
        await rig.died.wait()
        assert "the device is gone" in rig.frontend.state.reason
        assert "more than 1 times" in rig.frontend.state.reason
        assert rig.metric("aserve_requests_in_flight") == 0


@pytest.mark.slow
async def test_adapters_are_loaded_again_and_a_lost_one_ends_only_its_own_requests(
    tmp_path: Path,
) -> None:
    """The first engine that tries it dies of it, which says nothing about the adapter."""
    paths = [tmp_path / name for name in ("kept", "lost")]
    async with running("filed", max_restarts=2) as rig:
        for slot, path in enumerate(paths, start=1):
            path.touch()
            assert await rig.core.run_job(LoadLora(slot, slot, str(path))) is None
        paths[1].unlink()
        (tmp_path / "kept.fatal").touch()
        rig.process.kill()
        await rig.has_restarted.wait()
        (*_, kept), (*_, lost) = await asyncio.gather(
            rig.ask("a", lora_slot=1), rig.ask("b", lora_slot=2)
        )
        assert kept.finish_reason == "length"
        assert lost.error is not None
        assert lost.error.message == "no such adapter"
        assert rig.metric("aserve_engine_restarts_total") == 2


@pytest.mark.slow
@pytest.mark.parametrize("is_kept", [True, False])
async def test_updated_weights_are_loaded_again_or_the_server_ends(
    tmp_path: Path, is_kept: bool
) -> None:
    weights = tmp_path / "weights"
    weights.touch()
    async with running("filed", max_restarts=1) as rig:
        assert await rig.core.run_job(LoadWeights(1, str(weights))) is None
        if not is_kept:
            weights.unlink()
        rig.process.kill()
        if is_kept:
            await rig.has_restarted.wait()
            assert (await rig.ask("a"))[-1].finish_reason == "length"
        else:
            await rig.died.wait()
            assert "could not be loaded again" in rig.frontend.state.reason


@pytest.mark.slow
async def test_an_engine_whose_updated_weights_are_gone_goes_on_sleeping(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.touch()
    async with running("filed") as rig:
        for job in (LoadWeights(1, str(weights)), Sleep()):
            assert await rig.core.run_job(job) is None
        weights.unlink()
        asked = asyncio.ensure_future(rig.ask("a"))
        error = await rig.core.run_job(Wake())
        assert error is not None
        assert "could not be loaded again" in error.message
        assert rig.process.returncode is not None, "nothing runs with other weights"
        assert not rig.died.is_set()
        weights.touch()
        assert await rig.core.run_job(Wake()) is None
        assert tokens_of(await asked) == expected(seed=1)


@pytest.mark.slow
async def test_requests_outlive_a_sleep_of_the_engine_unless_their_time_is_over() -> None:
    """It counts as no death, however often it sleeps."""
    async with running("slow", max_s=120, max_restarts=0) as rig:
        core, state = rig.core, rig.frontend.state
        long = {"max_tokens": 60}
        asked = [asyncio.ensure_future(rig.ask(f"{i}", seed=i, **long)) for i in range(4)]
        for number in range(2):
            await until_tokens(rig, 40 * (number + 1))
            timed = asyncio.ensure_future(rig.ask(f"timed{number}", max_tokens=60, timeout_s=1))
            await until_tokens(rig, (rig.metric("aserve_generation_tokens_total") or 0) + 6)
            assert [await core.run_job(Sleep()) for _ in range(2)] == [None, None]
            assert rig.process.returncode is not None
            assert liveness_of(state, 300).status == "alive"
            error = await core.run_job(LoadLora(2, 2, "there"))
            assert error is not None
            assert "sleeps" in error.message
            *_, late = await rig.ask(f"late{number}", timeout_s=0.001)
            assert late.error is not None
            assert late.error.code == "deadline_exceeded"
            assert (await timed)[-1].is_last
            assert not any(each.done() for each in asked)
            twice = await asyncio.gather(core.run_job(Wake()), core.run_job(Wake()))
            assert [*twice] == [None, None]
        for seed, answer in enumerate(await asyncio.gather(*asked)):
            assert tokens_of(answer) == expected(seed=seed, **long)
        assert rig.metric("aserve_engine_restarts_total") == 0
        assert len(core._journal) == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["relapsing", "refusing"])
async def test_an_engine_that_cannot_wake_goes_on_sleeping(kind: str, tmp_path: Path) -> None:
    async with running(kind, record=str(tmp_path / "recording")) as rig:
        assert await rig.core.run_job(Sleep()) is None
        assert await rig.core.run_job(Wake()) is not None
        assert not rig.died.is_set()
        assert await rig.core.run_job(Wake()) is None
        assert tokens_of(await rig.ask("a")) == expected(seed=1)


NAP_S = 0.2


@pytest.mark.slow
async def test_an_idle_engine_naps_until_a_request_or_a_job_comes() -> None:
    """It does not nap while it works, and a request that comes while it falls asleep waits, too."""
    async with running("steady", nap_after_s=NAP_S) as rig:
        state = rig.frontend.state
        await asyncio.sleep(NAP_S / 10)
        assert rig.core.is_up, "the time counts from the end of its start"
        for number in range(1, 4):
            answer = await rig.ask(f"{number}", max_tokens=60)
            assert tokens_of(answer) == expected(seed=1, max_tokens=60)
            assert rig.engine._num_starts == number, "it was up while it worked"
            if number == 1:
                await asyncio.to_thread(rig.process.wait, 5)
                health = health_of(state, 300)
                assert (health.status, "sleeps" in health.reason) == ("ready", True)
            while rig.core.is_up:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            assert state.refusal() is None
        assert await rig.core.run_job(Profile(1)) is None
        assert rig.core._sleep._idle_left_s(NAP_S) == NAP_S, "a nap would lose the profile"
        refused = await rig.core.run_job(Sleep())
        assert refused is not None
        assert refused.code == "profile_running"
        assert await rig.core.run_job(Profile(2, "there")) is None
        assert await rig.core.run_job(LoadLora(1, 1, "there")) is None
        while not rig.core._sleep._is_nap:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        num_starts = rig.engine._num_starts
        left = asyncio.ensure_future(rig.core.run_job(LoadLora(2, 2, "there")))
        while rig.engine._num_starts == num_starts:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        left.cancel()
        assert tokens_of(await rig.ask("behind")) == expected(seed=1)
        assert rig.engine._num_starts == num_starts + 1, "the wake-up goes on"
        assert await rig.core.run_job(Sleep()) is None
        waiting = asyncio.ensure_future(rig.ask("waiting", timeout_s=3 * NAP_S))
        assert (await waiting)[-1].error is not None, "the administrator's sleep is no nap"
        assert await rig.core.run_job(Wake()) is None
        assert tokens_of(await rig.ask("last")) == expected(seed=1)
        assert rig.metric("aserve_engine_restarts_total") == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["relapsing", "refusing"])
async def test_a_request_that_cannot_wake_the_engine_is_refused_and_the_next_one_tries_again(
    kind: str, tmp_path: Path
) -> None:
    async with running(kind, nap_after_s=NAP_S, record=str(tmp_path / "recording")) as rig:
        await asyncio.to_thread(rig.process.wait, 5)
        *_, refused = await rig.ask("a")
        assert refused.error is not None
        assert not rig.died.is_set()
        assert tokens_of(await rig.ask("b")) == expected(seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["relapsing", "refusing"])
async def test_an_engine_that_dies_while_it_starts_again_is_started_once_more(
    kind: str, tmp_path: Path
) -> None:
    """And each writes a recording of its own."""
    recording = tmp_path / "recording"
    async with running(kind, max_restarts=2, record=str(recording)) as rig:
        asked = asyncio.ensure_future(rig.ask("a"))
        await until_tokens(rig, 3)
        rig.process.kill()
        assert tokens_of(await asked) == expected(seed=1)
        assert rig.metric("aserve_engine_restarts_total") == 2
    assert sorted(os.listdir(tmp_path)) == ["recording", "recording.2"]


def test_restarts_wait_ever_longer_and_end_with_too_many_in_a_row() -> None:
    restarts = Restarts(12)
    delays_s = [restarts.delay_s(up_s=up_s) for up_s in (0, 1, -math.inf, *[STABLE_S - 1] * 9)]
    assert delays_s[:4] == [0, FIRST_DELAY_S, 2 * FIRST_DELAY_S, 4 * FIRST_DELAY_S]
    assert delays_s[-1] == LONGEST_DELAY_S
    assert restarts.delay_s(up_s=0) is None
    assert restarts.delay_s(up_s=STABLE_S) == 0
    assert restarts.delay_s(up_s=0) == FIRST_DELAY_S
    assert Restarts(0).delay_s(up_s=STABLE_S) is None
