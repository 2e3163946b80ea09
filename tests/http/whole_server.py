"""A server around a real scheduler, with real actors and KV pages, whose device is a fake."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from aserve.config import Facts, Raw, resolve
from aserve.frontend import Frontend
from aserve.load import Loaded
from aserve.server import connect_http
from aserve.startup import InThisProcess, Waits
from aserve.text.load import TextSide
from aserve.text.template import ChatTemplate
from tests.fakes.echo_engine import TEMPLATE
from tests.fakes.executor import FakeExecutor
from tests.text.vocabularies import byte_level_tokenizer


class WholeServer:
    """`client` asks it. Its metrics show what it holds."""

    def __init__(self, frontend: Frontend, client: aiohttp.ClientSession) -> None:
        self.client = client
        self.latency = frontend.metrics.latency
        self._registry = frontend.metrics.registry

    def metric(self, name: str, **labels: str) -> float:
        """The sum over all samples of that name with these labels."""
        return sum(
            sample.value
            for family in self._registry.collect()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    async def until_idle(self) -> None:
        """Returns when every request has ended and every page is free."""
        held = ("requests_in_flight", "sequences_running", "sequences_waiting", "kv_pages_used")
        left = {"all of them": 1.0}
        for _ in range(4000):
            left = {name: self.metric(f"aserve_{name}") for name in held}
            if not any(left.values()):
                return
            await asyncio.sleep(0.005)
        raise AssertionError(left)


@asynccontextmanager
async def whole_server(executor: FakeExecutor, **options: Any) -> AsyncIterator[WholeServer]:
    given = {"port": 0, "served_model_name": "echo", "no_prefix_cache": True, "grammar_workers": 0}
    resolved = resolve(Raw(command_line=given | options), Facts(default_model="none"))
    frontend = Frontend(resolved)
    http = connect_http(frontend)
    address = await http.start()
    try:
        text = TextSide(byte_level_tokenizer(), template=ChatTemplate(TEMPLATE))
        loaded = Loaded(executor, text)
        await InThisProcess(lambda *_: loaded).launch(frontend, Waits())
        async with aiohttp.ClientSession(address) as client:
            yield WholeServer(frontend, client)
    finally:
        await http.stop()
        await frontend.close()
