"""The real engine in its own process, on a real device, with the bundled model; nothing of HTTP."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import socket
from pathlib import Path

import msgspec
import pytest

from aserve.config import Facts, Raw, resolve
from aserve.engine_core import LocalExecutor
from aserve.errors import ConfigError
from aserve.frames import framed
from aserve.frontend import Frontend
from aserve.grammar.process import MODULE
from aserve.http.probes import health_of
from aserve.messages.changes import LoadWeights, Profile
from aserve.messages.requests import GenerateRequest, SamplingParams, TextPrompt
from aserve.processes import engine
from aserve.processes.engine_process import ENGINE, EngineProcess, numbered
from aserve.processes.link import Start
from aserve.processes.remote import RemoteEngineCore
from aserve.progress import OnStage
from aserve.text.load import load_text
from aserve.tiny import MODEL_DIR
from tests.e2e.server_process import children_of
from tests.fakes.lora_adapters import Recipe, write_adapter, write_merged

pytestmark = pytest.mark.slow

NUM_TOKENS = 40
START_S = 100.0  # a GPU's first start compiles kernels
PLAIN = SamplingParams(seed=1, temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


async def until_ready(app: Frontend) -> None:
    """Waits for the grammar worker, which the engine has started before it loaded the model."""
    while health_of(app.state, 300).status != "ready":
        assert app.state.watch.stage.stage == "grammars"
        await asyncio.sleep(0.01)
    assert app.state.watch.stage.stage == "started"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
async def test_the_engine_of_a_device_answers_over_its_socket_also_with_other_weights(
    device: str, tmp_path: Path
) -> None:
    given = {"device": device, "debug_checks": True}
    resolved = resolve(Raw(command_line=given), Facts(default_model=str(MODEL_DIR)))
    app = Frontend(resolved, on_death=lambda: None)
    process = EngineProcess(ENGINE, Start(resolved, str(MODEL_DIR), os.getcwd()))
    core = RemoteEngineCore(app.ports, process)

    async def tokens_of(name: str) -> bytes:
        request = GenerateRequest(name, TextPrompt("Once upon a time"), PLAIN)
        return b"".join([chunk.token_ids async for chunk in app.gateway.open(request)])

    async with asyncio.timeout(START_S):
        try:
            await core.open()
            ready = await core.ready
            assert device in ready.about
            await app.join(core, load_text(MODEL_DIR, resolved.model))
            await until_ready(app)
            answers = await asyncio.gather(*(tokens_of(f"r{number}") for number in range(3)))
            write_merged(tmp_path / "b", write_adapter(tmp_path / "a", Recipe(1)), Recipe(1))
            assert await core.run_job(LoadWeights(1, str(tmp_path / "b"))) is None
            assert await core.run_job(Profile(2)) is None
            changed = await tokens_of("changed")
            assert await core.run_job(Profile(3, str(tmp_path / "trace.json.gz"))) is None
            assert await core.run_job(LoadWeights(4, str(MODEL_DIR))) is None
            answers.append(await tokens_of("back"))
        finally:
            await app.close()
            await core.close()
    with gzip.open(tmp_path / "trace.json.gz") as trace:
        assert json.load(trace)["traceEvents"]
    assert len(answers[0]) == 4 * NUM_TOKENS
    assert answers == [answers[0]] * 4 != [changed] * 4
    assert app.state.phase != "dead"
    assert process.process is not None
    assert process.process.returncode == 0


@pytest.mark.parametrize(("is_restart", "num_workers"), [(False, 1), (True, 0)])
async def test_a_restarted_engine_loads_before_it_starts_a_grammar_worker(
    is_restart: bool, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []

    def load(start: Start, on_stage: OnStage) -> LocalExecutor:
        found.append(len(children_of(os.getpid(), module=MODULE)))
        raise ConfigError("it is enough")

    for name in ("start_logging", "prepare_process"):
        monkeypatch.setattr(engine, name, lambda *_: None)
    resolved = resolve(Raw(command_line={"grammar_workers": 1}), Facts(default_model="none"))
    first = Start(resolved, "nowhere", os.getcwd())
    start = numbered(first, num_starts=int(is_restart))
    ours, theirs = socket.socketpair()
    with ours:
        ours.sendall(framed(msgspec.msgpack.encode([start])))
        assert await engine.EngineSide(load).run(theirs) == 1
    assert found == [num_workers]
