"""A stand-in for CUDA graphs on the CPU: a body's torch operators are recorded once, and the same
operators run again at each replay, over the same tensors.

What the body read of the host stays as it was, and results lie in buffers that the next replay
overwrites, as with a CUDA graph. Only torch's operators are seen: a body must not write through
numpy or numba.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from aserve.gpu.device.base import Captured, GraphBreak
from aserve.gpu.device.cpu.device import CpuDevice

# Of operators whose result, or its shape, the host has to know.
ASKING = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
INDEXING = frozenset({"index", "index_put", "index_put_"})  # these ask where a mask is an index
MASKS = (torch.bool, torch.uint8)


class RecordingCpu(CpuDevice):
    """The CPU as a device that captures steps."""

    def capture(self, body: Callable[[GraphBreak], Tensor]) -> Captured:
        return record(body)


def record(body: Callable[[GraphBreak], Tensor]) -> Recording:
    """Runs `body` once. RuntimeError if it asks the device for a value."""
    recorder = _Recorder()
    with recorder:
        recorder.graph_break(body(recorder.graph_break))
    return Recording(recorder.parts)


class Recording:
    """A `Captured`."""

    __slots__ = ("_parts",)

    def __init__(self, parts: list[_Part]) -> None:
        self._parts = parts

    def replay(self, on_break: GraphBreak) -> Tensor:
        made: dict[int, Tensor] = {}  # by the id of what the same call made in the recording
        *first_parts, last = self._parts
        for part in first_parts:
            on_break(part.run(made))
        return last.run(made)


@dataclass(frozen=True, slots=True)
class _Call:
    operator: torch._ops.OpOverload
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    made: object

    def run(self, made: dict[int, Tensor]) -> None:
        def now(recorded: Tensor) -> Tensor:
            return made.get(id(recorded), recorded)

        args, kwargs = tree_map_only(Tensor, now, (self.args, self.kwargs))
        result = self.operator(*args, **kwargs)
        for recorded, value in zip(tree_leaves(self.made), tree_leaves(result), strict=True):
            made[id(recorded)] = value


@dataclass(frozen=True, slots=True)
class _Part:
    """The calls up to a graph break or the end. The last call makes `static`, which gets its new
    values in a replay."""

    calls: tuple[_Call, ...]
    static: Tensor

    def run(self, made: dict[int, Tensor]) -> Tensor:
        for call in self.calls:
            call.run(made)
        return self.static.copy_(made[id(self.static)])


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch says no types
        self.parts: list[_Part] = []
        self._calls: list[_Call] = []

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if _asks(func, args):
            raise RuntimeError(f"{func} asks the device for a value, so it cannot be captured")
        made = func(*args, **(kwargs or {}))
        self._calls.append(_Call(func, args, kwargs or {}, made))
        return made

    def graph_break(self, values: Tensor) -> None:
        static = values.clone()
        self.parts.append(_Part(tuple(self._calls), static))
        self._calls.clear()


def _asks(func: torch._ops.OpOverload, args: tuple[object, ...]) -> bool:
    if func.overloadpacket.__name__ in INDEXING:
        return any(isinstance(i, Tensor) and i.dtype in MASKS for i in tree_leaves(args[1]))
    return not ASKING.isdisjoint(func.tags)
