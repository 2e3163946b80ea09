"""The interface of a device: streams, events, copies, graph capture, memory, and the operators and
weight formats that it prefers.

The executor thread and the waiter thread are its only callers. A device keeps no state of the
engine.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from aserve.gpu.device.ops import DeviceOps
from aserve.gpu.weights.format import WeightFormat, WeightRequest


class Event(Protocol):
    """A point in the executor's stream that other threads can wait for."""

    def synchronize(self) -> None:
        """Blocks the calling thread until all work before the event is done. It neither spins nor
        holds the interpreter lock."""


# Ends one graph and begins the next within a captured body; the tensor is handed to the host
# between the two replays.
GraphBreak: TypeAlias = Callable[[Tensor], None]


class Captured(Protocol):
    """The captured device work of a function, which can be replayed without its Python code."""

    def replay(self, on_break: GraphBreak) -> Tensor:
        """Replays the work on the executor's stream, in order with all other work there. The result
        and the tensors that `on_break` gets are those of the capture with new values; the next
        replay of any capture may overwrite them."""


class Device(Protocol):
    about: str  # its name and the reason for the choice, for the log
    torch_device: torch.device
    runs_behind: bool  # whether work runs asynchronously to the executor thread
    graph_rows: int  # default for the largest captured step; 0: this device captures none
    max_rows: int  # default for the rows of a step
    max_batched_tokens: int  # default for the tokens of a step
    attention: tuple[str, ...]  # names of attention backends, best first
    logits_elements: int  # bound of the logits that are alive at a time, in elements

    def stream(self) -> AbstractContextManager[None]:
        """Enters the stream of the executor thread, on which everything is made once the model is
        loaded. The stream waits for the calling thread's earlier work on the device."""

    def mark(self) -> Event:
        """Records an event on the stream. Raises the error that has made the device unusable, if
        there was one."""

    def host_buffer(self, num_words: int) -> Tensor:
        """int32 [num_words] of host memory that copies use without blocking (pinned memory)."""

    def stage(self, host: Tensor, buffer: Tensor | None = None) -> Tensor:
        """Copies `host` to the device, into `buffer` if one of the same length is given. `host` may
        be written again once a later event is done."""

    def capture(self, body: Callable[[GraphBreak], Tensor]) -> Captured:
        """Captures the device work of `body`: its operators, shapes, and the addresses of all
        tensors that it reads or writes. Call it on the executor's thread, within `stream`.

        Values that `body` reads on the host are frozen into the capture. `body` may be run once
        before (to compile, to allocate), so a run must have no lasting effect. It must neither wait
        for the device nor copy from or to the host. Where it calls `graph_break(values)`, one graph
        ends and the next begins; a replay calls `on_break(values)` between the two.

        All captures share one memory pool, and the inputs of a body stay alive as long as its
        `Captured`. If the body fails or cannot be captured, RuntimeError is raised and the stream
        is as before.
        """

    def copy_out(self, values: Tensor, host: Tensor) -> Event:
        """Copies `values` to the host. The event comes after the copy and all earlier work. Until
        then `values` must not be written; the caller need not keep it alive."""

    def weight_format(self, request: WeightRequest) -> WeightFormat:
        """Returns the best format for a model's weights. A dtype that the user named is
        honoured.
        """

    def ops(self, dtype: torch.dtype, *, is_deterministic: bool) -> DeviceOps:
        """Returns the fastest operators for a dtype; this may compile them. If `is_deterministic`,
        a token's result has the same bits in whatever step it is computed.
        """

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns a large zeroed pool. Pages that are never written need not be resident."""

    def free_bytes(self) -> int:
        """Returns the memory that this process may still allocate."""

    def kv_bytes(self, run_largest: Callable[[], None], *, share: float) -> int:
        """Returns the size of the KV cache that fits beside the loaded model and the peak memory of
        `run_largest`, which runs the largest steps. `share` is the part of the device's own memory
        that the process may use in all.
        """


def slice_len_of(device: Device, *, vocab_size: int) -> int:
    """Returns the number of tokens whose logits are computed at a time.

    PERF: an even one, so that the slices of int64 columns begin at multiples of 16 bytes. Triton
    specialises kernels on that, and others would be compiled while requests wait.
    """
    return max(1, device.logits_elements // vocab_size // 2 * 2)
