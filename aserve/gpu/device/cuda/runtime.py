"""The part of CUDA that the device uses: streams, events, graphs, pinned memory.

`TorchCuda` implements it with torch.cuda. A second implementation in the tests needs no GPU and
fails where accesses on two streams would race.
"""

from __future__ import annotations

import contextlib
import gc
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from aserve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Memory:
    """The device's memory in bytes."""

    free: int
    total: int


class CudaEvent(Protocol):
    def synchronize(self) -> None:
        """Blocks the calling thread, without the interpreter lock, until the event is done."""


# Makes the context of a thread's wait for the device.
WaitContext: TypeAlias = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class WatchedEvent:
    """An event whose waits are within a context."""

    event: CudaEvent
    waiting: WaitContext

    def synchronize(self) -> None:
        with self.waiting():
            self.event.synchronize()


class CudaStream(Protocol):
    def record_event(self, event: CudaEvent) -> None: ...

    def wait_event(self, event: CudaEvent) -> None:
        """Makes all later work on this stream wait for the event."""

    def wait_stream(self, stream: CudaStream) -> None: ...


class CudaGraph(Protocol):
    """A CUDA graph. All graphs of a runtime share one memory pool."""

    def begin(self) -> None:
        """Begins a capture of the calling thread's stream. Other threads may wait for events
        meanwhile."""

    def end(self) -> None: ...

    def abandon(self) -> None:
        """Ends a capture that has failed, and ignores its errors."""

    def replay(self) -> None: ...


class CudaRuntime(Protocol):
    about: str
    torch_device: torch.device
    has_bfloat16: bool
    has_fp8: bool  # products of fp8 on tensor cores

    def current_stream(self) -> CudaStream:
        """Returns the calling thread's current stream."""

    def new_stream(self) -> CudaStream: ...

    def on(self, stream: CudaStream) -> AbstractContextManager[None]:
        """Makes `stream` the calling thread's current stream, for work and for allocations."""

    def new_event(self) -> CudaEvent: ...

    def new_graph(self) -> CudaGraph: ...

    def pinned(self, num_words: int) -> Tensor:
        """int32 [num_words] of pinned host memory."""

    def keep(self, tensor: Tensor, stream: CudaStream) -> None:
        """Keeps the tensor's memory from reuse until the work that `stream` has now is done."""

    def memory(self) -> Memory:
        """Returns the device's memory. Memory that torch's allocator caches but does not use is
        free.
        """

    def growth(self, run: Callable[[], None]) -> int:
        """Returns the peak of allocated bytes during `run`, less what stays allocated after it,
        such as graphs: that is part of `memory` from then on."""

    def synchronize(self) -> None:
        """Blocks until the device has done all its work."""


def pinned_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns zeros in pinned memory of the host, of exactly their size.

    WHY not pin_memory: torch rounds each block of it up to a power of two, and blocks may take half
    of the host's memory.
    """
    memory = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    driver, address = torch.cuda.cudart(), memory.ctypes.data
    if error := int(driver.cudaHostRegister(address, memory.nbytes, 0)):
        raise ConfigError(
            f"the host cannot pin {memory.nbytes} bytes (CUDA error {error}); lower what "
            "--enable-hisparse keeps there (host_to_device_ratio), or raise `ulimit -l`",
            param="enable_hisparse",
        )
    weakref.finalize(memory, driver.cudaHostUnregister, address).atexit = False
    return torch.from_numpy(memory).view(dtype).view(shape)


class SideStream:
    """A stream beside that of the caller, for work that reads what the caller has computed. The
    caller's stream never waits for it."""

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


class TorchCuda:
    """torch.cuda on the device that is current when this is made."""

    __slots__ = ("_graph_pool", "about", "has_bfloat16", "has_fp8", "torch_device")

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self.about = torch.cuda.get_device_name(self.torch_device)
        capability = torch.cuda.get_device_capability(self.torch_device)
        self.has_bfloat16 = capability >= (8, 0)
        self.has_fp8 = capability >= (8, 9)
        # WHY not graph_pool_handle: the allocator would forget that pool when a capture fails
        # before another one has succeeded, and later captures would fail, too.
        self._graph_pool = torch.cuda.MemPool()

    def current_stream(self) -> CudaStream:
        return _as_stream(torch.cuda.current_stream(self.torch_device))

    def new_stream(self) -> CudaStream:
        return _as_stream(torch.cuda.Stream(self.torch_device))

    def on(self, stream: CudaStream) -> AbstractContextManager[None]:
        return torch.cuda.stream(_as_torch(stream))

    def new_event(self) -> CudaEvent:
        """NOTE: with `blocking` a wait sleeps in the driver, without the interpreter lock."""
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
        """Memory that torch's allocator reserves. What libraries allocate by themselves and keep is
        part of `memory` afterwards, as well."""
        self.memory()
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        run()
        torch.cuda.synchronize(self.torch_device)
        peak = torch.cuda.max_memory_reserved(self.torch_device)
        self.memory()  # gives back what is only cached
        return peak - torch.cuda.memory_reserved(self.torch_device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)


class _TorchGraph:
    __slots__ = ("_graph", "_pool")

    def __init__(self, pool: torch.cuda.MemPool) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._pool = pool

    def begin(self) -> None:
        self._graph.capture_begin(pool=_handle(self._pool), capture_error_mode="thread_local")

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
        """WHY: ending an invalid capture raises before torch has told its allocator of the end. The
        allocator would from then on hold back all memory that two streams have used."""
        device = torch.cuda.current_device()
        with contextlib.suppress(RuntimeError):  # the allocator knew; a later part has failed
            torch._C._cuda_endAllocateToPool(device, self._pool.id)
            torch._C._cuda_releasePool(device, self._pool.id)

    def replay(self) -> None:
        self._graph.replay()


def _handle(pool: torch.cuda.MemPool) -> torch.cuda._POOL_HANDLE:
    return cast(torch.cuda._POOL_HANDLE, pool.id)


def _as_stream(stream: torch.cuda.Stream) -> CudaStream:
    return cast(CudaStream, stream)


def _as_torch(stream: CudaStream) -> torch.cuda.Stream:
    """A runtime is given only streams that it has made."""
    return cast(torch.cuda.Stream, stream)
