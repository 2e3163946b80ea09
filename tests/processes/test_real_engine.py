"""The real engine in its own process, on a real device, with the bundled model; nothing of HTTP."""

from __future__ import annotations

import asyncio
import os

import pytest

from aserve.channel import Channel
from aserve.config import Facts, Raw, resolve
from aserve.engine_core import EngineCorePorts
from aserve.messages.base import array_i32, pack_i32
from aserve.messages.output import DetokenizerEvent, Retired, StepOutput
from aserve.messages.requests import AdmitRequest, SamplingParams
from aserve.observability.reports import EngineReport, TurnReport
from aserve.observability.trace import Trace
from aserve.processes.protocol import Start
from aserve.processes.remote import ENGINE, RemoteEngineCore
from aserve.text.load import load_tokenizer
from aserve.tiny import MODEL_DIR

pytestmark = pytest.mark.slow

NUM_TOKENS = 40
START_S = 100.0  # a GPU's first start compiles kernels


class Rig:
    def __init__(self) -> None:
        self.text: Channel[DetokenizerEvent] = Channel()
        self.reports: list[EngineReport] = []
        self.deaths: list[str] = []
        self.core = RemoteEngineCore(EngineCorePorts(self.text, self.reports.append, Trace()))

    async def start(self, device: str) -> str:
        """What the engine says about itself."""
        given = {"device": device, "debug_checks": True}
        resolved = resolve(Raw(command_line=given), Facts(default_model=str(MODEL_DIR)))
        await self.core.open(ENGINE, Start(resolved, str(MODEL_DIR), os.getcwd()))
        ready = await self.core.ready
        await self.core.start(self.died)
        for actor in self.core.actors:
            actor.start(self.died)
        return ready.about

    def died(self, name: str, error: BaseException) -> None:
        self.deaths.append(f"{name}: {error}")

    async def outputs(self, requests: list[AdmitRequest]) -> dict[str, list[int]]:
        """The tokens of each request, once all have ended."""
        for request in requests:
            self.core.inbox.send(request)
        found: dict[str, list[int]] = {request.request_id: [] for request in requests}
        living = set(found)
        async for events in self.text.batches():
            for event in events:
                if isinstance(event, StepOutput):
                    for output in event.sequences:
                        found[output.request_id] += array_i32(output.token_ids).tolist()
                elif isinstance(event, Retired):
                    living.remove(event.request_id)
            if not living:
                break
        return found


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
async def test_the_engine_of_a_device_answers_over_its_socket(device: str) -> None:
    tokenizer = load_tokenizer(MODEL_DIR)
    prompt = pack_i32(tokenizer.encode("Once upon a time", with_special=True))
    plain = SamplingParams(seed=1, temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    requests = [AdmitRequest(f"r{number}", prompt, plain) for number in range(3)]
    rig = Rig()
    async with asyncio.timeout(START_S):
        try:
            assert device in await rig.start(device)
            found = await rig.outputs(requests)
        finally:
            await rig.core.close()
    assert {name: len(tokens) for name, tokens in found.items()} == dict.fromkeys(
        ("r0", "r1", "r2"), NUM_TOKENS
    )
    launched = [report for report in rig.reports if isinstance(report, TurnReport)]
    assert sum(report.num_finished for report in launched) >= NUM_TOKENS
    assert rig.deaths == []
    assert rig.core._process is not None
    assert rig.core._process.returncode == 0
