"""A stream beside that of the caller, for work that reads what the caller has computed.

    caller's stream   compute x | compute y | compute z
    side stream                   use x       use y

The caller's stream never waits for it: copies of results to the host and messages to the next stage
of a pipeline go there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from aserve.gpu.device.cuda.runtime import CudaEvent, CudaRuntime


class SideStream:
    __slots__ = ("_is_ready", "_runtime", "_stream")

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        self._stream = runtime.new_stream()
        self._is_ready = runtime.new_event()  # recorded anew for each piece of work

    @contextmanager
    def reading(self, values: Tensor) -> Iterator[None]:
        """Within it, work goes to this stream, behind all that the caller's stream has. The memory
        of `values` is kept for it, but nothing keeps the caller from writing there."""
        self._runtime.current_stream().record_event(self._is_ready)
        self._stream.wait_event(self._is_ready)
        with self._runtime.on(self._stream):
            yield
        self._runtime.keep(values, self._stream)

    def mark(self) -> CudaEvent:
        """Returns an event behind all that this stream has."""
        event = self._runtime.new_event()
        self._stream.record_event(event)
        return event
