"""What the executor and its waiter ask of a kind of device: streams, events, host buffers, copies.

It knows no step, row or model. A device holds no state of ours.
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
    """A mark behind what the executor thread asked for; others may wait for it."""

    def synchronize(self) -> None:
        """Blocks the calling thread, without spinning and without the interpreter lock, until what
        was before the mark is done.
        """


Cut: TypeAlias = Callable[[Tensor], None]


class Captured(Protocol):
    """A body's work on the device, to be run again without its Python."""

    def replay(self, on_cut: Cut) -> Tensor:
        """On the executor's stream, in order with all other work there. The result, and what
        `on_cut` gets, are as in the capture but for their values: the next replay, of this or of
        any other captured body, may overwrite them.
        """


class Device(Protocol):
    about: str  # what it is, and why it was chosen, in a few words
    torch_device: torch.device
    runs_behind: bool  # work is done later than the executor thread asks for it
    graph_rows: int  # of the largest step that is captured, if nobody says otherwise; 0: none is
    max_rows: int  # that run at once, if nobody says otherwise
    max_batched_tokens: int  # of one step, likewise
    attention: tuple[str, ...]  # the backends for it by name, best first
    logits_elements: int  # of logits so many at most are alive at a time

    def stream(self) -> AbstractContextManager[None]:
        """The stream of all that is made once the model is loaded, and of the executor thread. It
        goes on behind what the calling thread asked of the device before.
        """

    def mark(self) -> Event:
        """Behind all that was asked for on the stream so far. Raises what has made the device
        unusable, if anything has.
        """

    def host_buffer(self, num_words: int) -> Tensor:
        """int32 [num_words] on the host, such that copies to and from it do not block."""

    def stage(self, host: Tensor, buffer: Tensor | None = None) -> Tensor:
        """A copy of `host` on the device, in `buffer` if one is given, which is as long; `host`
        may change once an event after this is done.
        """

    def capture(self, body: Callable[[Cut], Tensor]) -> Captured:
        """On the executor's thread, within `stream`. What `body` does is recorded: operators,
        kernels, shapes, and the addresses of all tensors that they read or write. What it reads of
        the host is as it was, at every replay. `body` may be run before (to compile, to allocate),
        and writes nothing that matters. It does not wait for the device, nor copy from or to the
        host. Where it calls `cut(values)`, what comes before is replayed by itself, then
        `on_cut(values)` is called. All captures share one pool of memory; what a body was given
        stays alive for as long as its Captured. A body that fails, or cannot be captured, raises
        RuntimeError, and leaves the stream as it was.
        """

    def copy_out(self, values: Tensor, host: Tensor) -> Event:
        """Once the event is done `host` holds `values`, and what came before is done, too. Until
        then `values` must not be written, and need not be kept.
        """

    def weight_format(self, request: WeightRequest) -> WeightFormat:
        """How this device holds a model's weights best; a dtype given by name is honoured."""

    def ops(self, dtype: torch.dtype, *, is_deterministic: bool) -> DeviceOps:
        """Those that are fastest here; may compile them. What `is_deterministic` gives a token the
        same bits in whatever step it is computed."""

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A large pool. What is never written need not be resident."""

    def free_bytes(self) -> int:
        """What this process may still allocate."""

    def kv_bytes(self, run_largest: Callable[[], None], *, share: float) -> int:
        """How much KV may take, once the model is loaded and beside what `run_largest` takes on
        top. `share` is the part of a device's own memory that may be used in all.
        """


def slice_len_of(device: Device, *, vocab_size: int) -> int:
    """Logits of so many tokens are computed at a time."""
    return max(1, device.logits_elements // vocab_size)
