"""What is waited for at the start ends with a signal, whenever it comes."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from aserve import startup
from aserve.config import Facts, Raw, resolve
from aserve.startup import InItsOwnProcess, InThisProcess, Stopped, Waits, launcher_of
from aserve.tiny import MODEL_DIR


async def test_a_wait_ends_with_its_future_or_with_the_signal() -> None:
    waits = Waits()
    loop = asyncio.get_running_loop()
    here: asyncio.Future[int] = loop.create_future()
    loop.call_soon(here.set_result, 3)
    assert await waits.until(here) == 3
    loop.call_soon(waits.end)
    with pytest.raises(Stopped):
        await waits.until(loop.create_future())
    with pytest.raises(Stopped):
        await waits.until(loop.create_future())  # nothing is waited for after the signal


@pytest.mark.parametrize(
    ("options", "has_cuda", "kind"),
    [
        ({}, False, InThisProcess),
        ({}, True, InItsOwnProcess),
        ({"processes": "1"}, True, InThisProcess),
        ({"processes": "2"}, False, InItsOwnProcess),
        ({"sleep_idle_seconds": 5}, False, InItsOwnProcess),
    ],
)
def test_the_engine_has_its_own_process_beside_a_gpu_or_where_the_user_says_so(
    options: dict[str, object], has_cuda: bool, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "may_have_cuda", lambda device: has_cuda)
    resolved = resolve(Raw(command_line=options), Facts(default_model="none"))
    assert type(launcher_of(resolved)) is kind


def test_a_frontend_finds_its_model_and_reads_its_text_without_torch() -> None:
    """It would take its memory twice, and a second of the start."""
    code = (
        "import sys, aserve.server\n"
        "from aserve.config import Facts, Raw, resolve\n"
        "from aserve.load import find_model\n"
        "from aserve.text.load import load_text\n"
        f"resolved = resolve(Raw(), Facts(default_model={str(MODEL_DIR)!r}))\n"
        "load_text(find_model(resolved), resolved.model)\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
