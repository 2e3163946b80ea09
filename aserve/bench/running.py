"""An executor without an engine around it: started, warm, and closed at the end.

It does not know what is run on it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from aserve.core import LocalExecutor


@contextlib.asynccontextmanager
async def running(executor: LocalExecutor) -> AsyncIterator[None]:
    """NOTE: what is still in flight when it is left runs to its end first."""
    executor.start(asyncio.get_running_loop())
    try:
        await executor.warm_up()
        yield
    finally:
        executor.close()
