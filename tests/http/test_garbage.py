"""A request leaves no reference cycles: the collector looks for old ones after millions of objects.

Until then they would be the growth of a server's memory.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator

import pytest
from aiohttp import web

from tests.fakes.echo_engine import EchoEngine


@pytest.fixture
def collector() -> Iterator[None]:
    """The collector looks at new objects only, and keeps what it finds in `gc.garbage`."""
    gc.freeze()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    yield
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize("ending", ["whole", "streamed", "left", "refused"])
async def test_a_request_that_has_ended_is_no_garbage(
    echo: EchoEngine, collector: None, path: str, ending: str
) -> None:
    body = {
        "prompt": "a",
        "input": "a",
        "messages": [{"role": "user", "content": "a"}],
        "stream": ending != "whole",
        "temperature": 3 if ending == "refused" else 0,
    }
    for _ in range(3):
        async with echo.web.post(path, json=body) as answer:
            assert (answer.status == 400) is (ending == "refused")
            if ending == "left":
                await answer.content.readline()
                answer.close()
            else:
                await answer.read()
    async with echo.web.get("/ping") as answer:  # by now the others have ended
        await answer.read()
    gc.collect()
    kinds = Counter(type(each) for each in gc.garbage)
    ours = [kind for kind in kinds if kind.__module__.startswith("aserve.")]
    assert not kinds[web.Request], ours
    assert not kinds[web.StreamResponse], ours
