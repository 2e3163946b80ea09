"""Loads an adapter while the engine serves: a thread reads it, and the executor's thread writes it
between two steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from aserve.errors import ConfigError, EngineDead, EngineError, ErrorInfo, InvalidRequest
from aserve.gpu.lora.adapter import LoraAdapter
from aserve.gpu.lora.tables import LoraTables
from aserve.host.threads import in_thread
from aserve.messages.requests import LoadLora

# What is raised for files that hold no adapter of this model.
UNREADABLE = (ConfigError, OSError, RuntimeError, ValueError, MemoryError)


async def load_adapter(
    tables: LoraTables | None,
    load: LoadLora,
    *,
    submit: Callable[[Callable[[], None]], None],
    died: asyncio.Future[BaseException],
) -> ErrorInfo | None:
    """Returns the error if the adapter cannot be loaded. `submit` takes a job for the executor's
    thread, behind the steps that were launched; `died` completes if that thread ends.
    """
    if tables is None:
        return InvalidRequest(
            "the engine takes no LoRA adapters: start it with --enable-lora"
        ).info()
    try:
        adapter = await in_thread(lambda: tables.read(Path(load.path)), name="lora")
    except UNREADABLE as error:
        return InvalidRequest(str(error), param="lora_path", code="invalid_adapter").info()
    written: Future[None] = Future()
    submit(lambda: _write(tables, load.slot, adapter, written))
    outcome = asyncio.wrap_future(written)
    await asyncio.wait((outcome, died), return_when=asyncio.FIRST_COMPLETED)
    if not outcome.done():
        return EngineDead(f"the device thread ended: {died.result()!r}").info()
    if (reason := outcome.exception()) is not None:
        return EngineError(f"the adapter could not be written to the device: {reason}").info()
    return None


def _write(tables: LoraTables, slot: int, adapter: LoraAdapter, written: Future[None]) -> None:
    """NOTE: an exception that left this job would end the executor's thread."""
    try:
        tables.write(slot, adapter)
    except RuntimeError as error:  # all that torch raises
        written.set_exception(error)
    else:
        written.set_result(None)
