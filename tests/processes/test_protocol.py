"""What the two processes say to each other crosses a socket as it is."""

from __future__ import annotations

import msgspec
import pytest

from aserve.config import Facts, Raw, resolve
from aserve.errors import QueueFull
from aserve.messages.base import Message
from aserve.messages.executor import EngineSpec, GroupSpec
from aserve.messages.output import Refused
from aserve.messages.requests import Cancel
from aserve.observability.reports import Beat, GrammarCompiled, TurnReport
from aserve.processes.protocol import Died, LoadFailed, Ready, Start, ToEngine, ToFrontend

GIVEN = {"model": "somewhere", "num_pages": 7, "overlap_lead": 1, "drain_timeout": 2.5, "seed": 3}
SPEC = EngineSpec(
    page_size=16,
    groups=(GroupSpec("full", 9), GroupSpec("window", 5, window=64)),
    max_rows=2,
    max_model_len=64,
    max_batched_tokens=64,
    vocab_size=2048,
)
TO_ENGINE = (
    Start(resolve(Raw(command_line=GIVEN), Facts(default_model="none")), "/models/somewhere", "/"),
    Cancel("a", 1, 3, "cancelled"),
)
TO_FRONTEND = (
    Ready(SPEC, "on a device"),
    LoadFailed("no such model", is_config=True),
    Died("scheduler", "BugError: no"),
    Beat((("pump", 1), ("masks", 0))),
    TurnReport(("a",), num_finished=1),
    GrammarCompiled("ok", 0.5),
    Refused("a", QueueFull("full").info()),
)


@pytest.mark.parametrize(
    ("kind", "message"),
    [(ToEngine, message) for message in TO_ENGINE]
    + [(ToFrontend, message) for message in TO_FRONTEND],
    ids=lambda value: type(value).__name__,
)
def test_a_message_comes_back_as_it_was(kind: object, message: Message) -> None:
    data = msgspec.msgpack.encode([message])
    assert msgspec.msgpack.Decoder(list[kind]).decode(data) == [message]  # type: ignore[valid-type]  # a type form
