"""A stand-in for CUDA graphs on the CPU. It records the torch operators of a function once, and
each replay runs the same operators on the same tensors.

As with a CUDA graph, host values keep their recorded values, every tensor of the recording stays
where it is, and the next replay overwrites it. Only torch's operators are recorded, so the function
must not write through numpy or numba.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from aserve.gpu.device.base import Captured, GraphBreak
from aserve.gpu.device.cpu.device import CpuDevice

# Tags of operators whose result, or its shape, the host has to know.
SYNCING = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
INDEXING = frozenset(
    {"index", "index_put", "index_put_"}
)  # these synchronise if an index is a mask
MASKS = (torch.bool, torch.uint8)


class RecordingCpu(CpuDevice):
    """The CPU device with capture of steps."""

    def capture(self, body: Callable[[GraphBreak], Tensor]) -> Captured:
        return record(body)


def record(body: Callable[[GraphBreak], Tensor]) -> Recording:
    """Runs and records `body`. Raises RuntimeError if it reads a value from the device."""
    recorder = _Recorder()
    with recorder:
        recorder.graph_break(body(recorder.graph_break))
    return Recording(recorder.parts)


class Recording:
    """The recording of a body; it implements `Captured`."""

    __slots__ = ("_parts",)

    def __init__(self, parts: list[_Part]) -> None:
        self._parts = parts

    def replay(self, on_break: GraphBreak) -> Tensor:
        *first_parts, last = self._parts
        for part in first_parts:
            on_break(part.run())
        return last.run()


@dataclass(frozen=True, slots=True)
class _Call:
    operator: torch._ops.OpOverload
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    made: object

    def run(self) -> None:
        """Writes the results where those of the recording are. Views are there already."""
        result = self.operator(*self.args, **self.kwargs)
        for recorded, value in zip(tree_leaves(self.made), tree_leaves(result), strict=True):
            if isinstance(recorded, Tensor) and _storage(recorded) != _storage(value):
                recorded.copy_(value)


@dataclass(frozen=True, slots=True)
class _Part:
    """The calls up to a graph break or the end. The last one makes `static`."""

    calls: tuple[_Call, ...]
    static: Tensor

    def run(self) -> Tensor:
        for call in self.calls:
            call.run()
        return self.static


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self.parts: list[_Part] = []
        self._calls: list[_Call] = []

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if _syncs(func, args):
            raise RuntimeError(f"{func} reads a value from the device, so it cannot be captured")
        made = func(*args, **(kwargs or {}))
        self._calls.append(_Call(func, args, kwargs or {}, made))
        return made

    def graph_break(self, values: Tensor) -> None:
        static = values.clone()
        self.parts.append(_Part(tuple(self._calls), static))
        self._calls.clear()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _syncs(func: torch._ops.OpOverload, args: tuple[object, ...]) -> bool:
    if func.overloadpacket.__name__ in INDEXING:
        return any(isinstance(i, Tensor) and i.dtype in MASKS for i in tree_leaves(args[1]))
    return not SYNCING.isdisjoint(func.tags)
