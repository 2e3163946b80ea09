"""Links are tested on Python's own loop and on the server's, whose transports differ."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest

from aserve.host.threads import new_event_loop


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    if item.get_closest_marker("slow") is not None:
        return {"server": new_event_loop}
    return {"asyncio": asyncio.new_event_loop, "server": new_event_loop}
