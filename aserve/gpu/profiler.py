"""Profiles of the executor's thread, by torch.profiler.

`begin` and `end` return what is to be done on that thread, because torch.profiler records the
thread on which it is started.
"""

from __future__ import annotations

import gzip
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from aserve.errors import InvalidRequest

logger = logging.getLogger(__name__)


class Profiler:
    """One profile at a time. The methods are called on the event loop's thread, except `write`."""

    def __init__(self) -> None:
        self._running: profile | None = None
        self._ended: profile | None = None  # it is not written yet

    def begin(self, flags: tuple[str, ...]) -> Callable[[], None]:
        if self._running is not None:
            raise InvalidRequest("A profile runs already.", code="profile_running")
        devices = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self._running = profile(
            activities=[ProfilerActivity.CPU, *devices],
            with_stack="with_stack" in flags,
            record_shapes="record_shapes" in flags,
        )
        return self._running.start

    def end(self) -> Callable[[], None]:
        if self._running is None:
            raise InvalidRequest("No profile runs.", code="no_profile")
        ended, self._running = self._running, None
        self._ended = ended
        return ended.stop

    def write(self, path: Path) -> None:
        """Writes a Chrome trace, compressed. It takes seconds."""
        ended, self._ended = self._ended, None
        assert ended is not None, "a profile is written once, when it has ended"
        path.parent.mkdir(parents=True, exist_ok=True)
        plain = path.with_suffix("")
        try:
            ended.export_chrome_trace(str(plain))
            with plain.open("rb") as source, gzip.open(path, "wb") as sink:
                shutil.copyfileobj(source, sink)
        finally:
            plain.unlink(missing_ok=True)
        logger.info("profile written path=%s", path)
