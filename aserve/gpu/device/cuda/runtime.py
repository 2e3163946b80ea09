"""What the CUDA device needs of CUDA: streams, events, pinned memory. torch.cuda is one of two
implementations; the other, in the tests, has no GPU, and fails on what would be a race there.

It knows nothing of what streams are for.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes."""

    free: int
    total: int


class CudaEvent(Protocol):
    def synchronize(self) -> None:
        """Blocks the calling thread, not the interpreter, until the event is done."""


class CudaStream(Protocol):
    def record_event(self, event: CudaEvent) -> None: ...

    def wait_event(self, event: CudaEvent) -> None:
        """What is asked of this stream from now on runs after what the event was recorded
        behind.
        """

    def wait_stream(self, stream: CudaStream) -> None: ...


class CudaGraph(Protocol):
    """All graphs of a runtime share one pool of memory."""

    def begin(self) -> None:
        """What the calling thread asks of its stream is recorded from now on, not run. Other
        threads may wait for events meanwhile."""

    def end(self) -> None: ...

    def abandon(self) -> None:
        """Ends a recording that has failed; what it says of that is no news."""

    def replay(self) -> None: ...


class CudaRuntime(Protocol):
    about: str
    torch_device: torch.device
    has_bfloat16: bool

    def current_stream(self) -> CudaStream:
        """The calling thread's."""

    def new_stream(self) -> CudaStream: ...

    def on(self, stream: CudaStream) -> AbstractContextManager[None]:
        """The calling thread's work goes there, and what it allocates belongs there."""

    def new_event(self) -> CudaEvent: ...

    def new_graph(self) -> CudaGraph: ...

    def pinned(self, num_words: int) -> Tensor:
        """int32 [num_words] on the host, which the device reaches by itself."""

    def keep(self, tensor: Tensor, stream: CudaStream) -> None:
        """Once the tensor is gone its memory serves again only after what `stream` has to do
        now.
        """

    def memory(self) -> Memory:
        """Of the device. What torch has taken and does not use counts as free."""

    def growth(self, run: Callable[[], None]) -> int:
        """Bytes that `run` takes at most, on top of what is taken before."""

    def synchronize(self) -> None:
        """Until the device has done everything."""


class TorchCuda:
    """The device that is torch's current one when this is made."""

    __slots__ = ("_graph_pool", "about", "has_bfloat16", "torch_device")

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self.about = torch.cuda.get_device_name(self.torch_device)
        self.has_bfloat16 = torch.cuda.get_device_capability(self.torch_device) >= (8, 0)
        self._graph_pool = torch.cuda.graph_pool_handle()

    def current_stream(self) -> CudaStream:
        return _as_stream(torch.cuda.current_stream(self.torch_device))

    def new_stream(self) -> CudaStream:
        return _as_stream(torch.cuda.Stream(self.torch_device))

    def on(self, stream: CudaStream) -> AbstractContextManager[None]:
        return torch.cuda.stream(_as_torch(stream))

    def new_event(self) -> CudaEvent:
        """NOTE: `blocking` makes its wait a sleep in the driver, and torch gives the interpreter
        lock up for it.
        """
        event: CudaEvent = torch.cuda.Event(blocking=True)
        return event

    def new_graph(self) -> CudaGraph:
        return _TorchGraph(self._graph_pool)

    def pinned(self, num_words: int) -> Tensor:
        return torch.empty(num_words, dtype=torch.int32, pin_memory=True)

    def keep(self, tensor: Tensor, stream: CudaStream) -> None:
        tensor.record_stream(_as_torch(stream))

    def memory(self) -> Memory:
        gc.collect()
        torch.cuda.synchronize(self.torch_device)
        torch.cuda.empty_cache()
        return Memory(*torch.cuda.mem_get_info(self.torch_device))

    def growth(self, run: Callable[[], None]) -> int:
        """As torch's allocator takes it from the device. What libraries take for themselves, and
        keep, is in `memory` after it.
        """
        self.memory()
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        before = torch.cuda.memory_reserved(self.torch_device)
        run()
        torch.cuda.synchronize(self.torch_device)
        return torch.cuda.max_memory_reserved(self.torch_device) - before

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)


class _TorchGraph:
    __slots__ = ("_graph", "_pool")

    def __init__(self, pool: torch.cuda._POOL_HANDLE) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._pool = pool

    def begin(self) -> None:
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> None:
        try:
            self._graph.capture_end()
        except RuntimeError:
            self._tell_allocator()
            raise

    def abandon(self) -> None:
        with contextlib.suppress(RuntimeError):
            self.end()

    def _tell_allocator(self) -> None:
        """WHY: the end of an invalid capture raises before torch has told its allocator, which
        would from then on keep back all memory that two streams have used.
        """
        device = torch.cuda.current_device()
        with contextlib.suppress(RuntimeError):  # it was told, and what came later has failed
            torch._C._cuda_endAllocateToPool(device, self._pool)
            torch._C._cuda_releasePool(device, self._pool)

    def replay(self) -> None:
        self._graph.replay()


def _as_stream(stream: torch.cuda.Stream) -> CudaStream:
    return cast(CudaStream, stream)


def _as_torch(stream: CudaStream) -> torch.cuda.Stream:
    """A runtime gets back only streams that it made."""
    return cast(torch.cuda.Stream, stream)
