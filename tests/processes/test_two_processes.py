"""The engine in a process of its own: how it comes up, serves, and ends, whoever ends first."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from aserve import startup
from aserve.config import Facts, Raw, Resolved, resolve
from aserve.errors import ConfigError, EngineDead
from aserve.frames import framed
from aserve.frontend import Frontend
from aserve.http.probes import liveness_of
from aserve.messages.changes import LoadLora
from aserve.messages.output import OutputChunk
from aserve.messages.requests import GenerateRequest, SamplingParams, TokenPrompt
from aserve.observability.reports import Beat, EngineReport, EngineUp, StartupStage
from aserve.processes.engine_process import EngineProcess
from aserve.processes.link import Start
from aserve.processes.remote import RemoteEngineCore
from aserve.server import Server
from aserve.startup import InItsOwnProcess
from aserve.text.load import TextSide
from aserve.tiny import MODEL_DIR
from tests.text.vocabularies import byte_level_tokenizer

TEXT = TextSide(byte_level_tokenizer())


def options(**given: object) -> Resolved:
    given = {"grammar_workers": 0} | given
    return resolve(Raw(command_line=given), Facts(default_model="none"))


def command(kind: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "tests.fakes.engine_process", kind)


class Rig:
    """A frontend whose engine is a fake one in another process."""

    def __init__(
        self,
        kind: str = "good",
        *,
        max_restarts: int = 0,
        nap_after_s: float | None = None,
        **given: object,
    ) -> None:
        self.died = asyncio.Event()
        self._resolved = options(**given)
        self.frontend = Frontend(self._resolved, on_death=self.died.set)
        self.has_beaten = asyncio.Event()
        self.has_restarted = asyncio.Event()
        ports = dataclasses.replace(self.frontend.ports, report=self._report)
        self.engine = EngineProcess(
            command(kind), Start(self._resolved, "nowhere", "/"), max_restarts=max_restarts
        )
        self.core = RemoteEngineCore(ports, self.engine, nap_after_s=nap_after_s)

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self.engine.process is not None
        return self.engine.process

    async def ask(
        self,
        name: str,
        *,
        lora_slot: int = 0,
        timeout_s: float | None = None,
        max_queue_s: float | None = None,
        **fields: Any,
    ) -> list[OutputChunk]:
        sampling = SamplingParams(**{"seed": 1, "max_tokens": 40, "ignore_eos": True} | fields)
        request = GenerateRequest(
            name,
            TokenPrompt((1, 2)),
            sampling,
            lora_slot=lora_slot,
            timeout_s=timeout_s,
            max_queue_s=max_queue_s,
        )
        return [chunk async for chunk in self.frontend.gateway.open(request)]

    def _report(self, report: EngineReport) -> None:
        self.frontend.ports.report(report)
        match report:
            case Beat():
                self.has_beaten.set()
            case EngineUp():
                self.has_restarted.set()
            case _:
                pass

    def metric(self, name: str, **labels: str) -> float | None:
        return self.frontend.metrics.registry.get_sample_value(name, labels)


@asynccontextmanager
async def running(kind: str = "good", *, max_s: float = 100, **given: Any) -> AsyncIterator[Rig]:
    rig = Rig(kind, **given)
    async with asyncio.timeout(max_s):
        try:
            await rig.core.open()
            await rig.core.ready
            await rig.frontend.join(rig.core, TEXT)
            yield rig
        finally:
            await rig.frontend.close()
            await rig.core.close()
    assert rig.process.returncode is not None


async def test_a_timed_request_is_told_the_states_that_it_had_in_the_other_process() -> None:
    async with running() as rig:
        sampling = SamplingParams(seed=1, max_tokens=40, ignore_eos=True)
        started_s = time.monotonic()
        timed = GenerateRequest("r-0", TokenPrompt((1, 2)), sampling, started_s=started_s)
        *_, last = [chunk async for chunk in rig.frontend.gateway.open(timed)]
        took_ms = 1000 * (time.monotonic() - started_s)
        timings = json.loads(last.timings)
        assert {"receive", "tokenize", "prefill", "decode"} <= set(timings["states"])
        assert sum(timings["states"].values()) == pytest.approx(timings["total_ms"])
        assert 0 < timings["total_ms"] <= took_ms
        assert (timings["predicted_n"], timings["prefill_chunks"]) == (40, 1)


async def test_an_engine_whose_step_does_not_come_back_writes_where_its_threads_stand(
    capfd: pytest.CaptureFixture[str],
) -> None:
    written = ""
    async with running("stuck", watchdog_timeout=0.2) as rig:
        asked = asyncio.create_task(rig.ask("r"))
        while "most recent call first" not in written:
            await asyncio.sleep(0.05)
            written += capfd.readouterr().err
        asked.cancel()
    assert "no step has ended" in written
    assert "_beat" in written


async def test_requests_are_answered_and_metrics_come_across() -> None:
    async with running() as rig:
        answers = await asyncio.gather(*(rig.ask(f"r{number}") for number in range(12)))
        for chunks in answers:
            assert chunks[-1].finish_reason == "length"
            assert sum(len(chunk.token_ids) // 4 for chunk in chunks) == 40
        launched = rig.metric("aserve_steps_launched_total")
        assert launched == rig.metric("aserve_forward_iteration")
        assert launched is not None
        assert launched >= 40
        assert rig.metric("aserve_queue_seconds_count") == 12
        rig.process.send_signal(signal.SIGSTOP)
        rig.core._heard_at_s -= 100
        rig.has_beaten.clear()
        assert liveness_of(rig.frontend.state, 300).status == "stuck"
        rig.process.send_signal(signal.SIGCONT)
        await rig.has_beaten.wait()
        assert rig.metric("aserve_inbox_messages", actor="scheduler") == 0
        assert liveness_of(rig.frontend.state, 300).status == "alive"
        assert rig.frontend.state.watch.stage == StartupStage("weights", 3, 4)
        assert rig.frontend.state.watch.step_age_s() == 0
    assert rig.process.returncode == 0


async def test_a_killed_engine_ends_every_request_with_one_error_and_says_by_what() -> None:
    async with running() as rig:
        await rig.ask("before", max_tokens=2)
        rig.process.send_signal(signal.SIGSTOP)
        asked = asyncio.gather(*(rig.ask(f"r{number}") for number in range(3)))
        await asyncio.sleep(0)
        rig.process.kill()
        for (chunk,) in await asked:
            assert chunk.is_last
            assert chunk.error is not None
            assert (chunk.error.status, chunk.error.code) == (503, "engine_dead")
        assert rig.died.is_set()
        assert rig.frontend.state.phase == "dead"
        assert "was ended by SIGKILL" in rig.frontend.state.reason


async def test_an_adapter_is_loaded_in_the_engines_process_or_the_reason_comes_back() -> None:
    """An engine that dies meanwhile is an answer, too."""
    async with running() as rig:
        assert await rig.core.run_job(LoadLora(1, 1, "there")) is None
        error = await rig.core.run_job(LoadLora(2, 1, "broken"))
        assert error is not None
        assert (error.status, error.message) == (400, "no adapter")
        rig.process.send_signal(signal.SIGSTOP)
        given_up = asyncio.ensure_future(rig.core.run_job(LoadLora(3, 1, "there")))
        asked = asyncio.ensure_future(rig.core.run_job(LoadLora(4, 1, "there")))
        await asyncio.sleep(0)
        given_up.cancel()
        rig.process.kill()
        error = await asked
        assert error is not None
        assert error.code == "engine_dead"


async def test_an_engine_whose_device_dies_says_of_what() -> None:
    async with running("mortal") as rig:
        *_, last = await rig.ask("a")
        assert last.error is not None
        assert last.error.code == "engine_dead"
        assert rig.frontend.state.reason.startswith("executor died")
        assert "the device is gone" in rig.frontend.state.reason
        assert rig.process.wait(10) == 1


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("wrong", ConfigError, "nowhere is no model"),
        ("stillborn", EngineDead, "the first step failed"),
        ("crash", EngineDead, "ended with exit code 7"),
    ],
)
async def test_an_engine_that_does_not_come_up_says_why(
    kind: str, error: type[Exception], message: str
) -> None:
    rig = Rig(kind)
    async with asyncio.timeout(30):
        await rig.core.open()
        with pytest.raises(error, match=message):
            await rig.core.ready
        await rig.core.close()
    assert rig.process.returncode is not None


async def test_an_engine_that_still_loads_is_killed_at_once() -> None:
    rig = Rig("sleeper")
    await rig.core.open()
    async with asyncio.timeout(30):
        await rig.core.close()
    assert rig.process.returncode == -signal.SIGKILL


async def test_a_signal_while_the_engine_loads_ends_the_server_with_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Seen(EngineProcess):
        def spawn(self) -> tuple[socket.socket, Start]:
            started.append(self)
            is_open.set()
            return super().spawn()

    started: list[EngineProcess] = []
    is_open = asyncio.Event()
    monkeypatch.setattr(startup, "EngineProcess", Seen)
    resolved = resolve(Raw(command_line={"port": 0}), Facts(default_model=str(MODEL_DIR)))
    serving = Server(resolved, InItsOwnProcess(command("sleeper")))
    exit_code = asyncio.ensure_future(serving.run())
    async with asyncio.timeout(30):
        await is_open.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        assert await exit_code == 0
    (engine,) = started
    assert engine.process is not None
    assert engine.process.returncode == -signal.SIGKILL


async def test_signals_to_both_processes_are_the_frontends_to_answer() -> None:
    async with running() as rig:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(rig.process.pid, number)
        (*_, last) = await rig.ask("a")
        assert last.finish_reason == "length"
        assert rig.process.poll() is None


@pytest.mark.parametrize("kind", ["good", "sleeper"])
def test_an_engine_without_a_frontend_ends_by_itself(kind: str) -> None:
    ours, theirs = socket.socketpair()
    with theirs, ours:
        process = subprocess.Popen(command(kind), stdin=theirs.fileno())
        theirs.close()
        ours.sendall(framed(msgspec.msgpack.encode([Start(options(), "nowhere", "/")])))
        if kind == "good":
            assert ours.recv(1), "it is ready"
        ours.close()
        assert process.wait(30) == 0
