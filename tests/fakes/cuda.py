"""A CUDA runtime without a GPU: nothing runs before somebody waits for it, or chance lets it.

Its device is torch's "meta": a tensor there has a shape and a life, and no values, so that whatever
asks it for one fails by itself. Each storage has a twin with values on the CPU. Operators are put
into the queue of their thread's stream, and run on the twins later. Clocks tell what is ordered
behind what, whenever it runs; `hazards` says what would be a race, or a wait, on a GPU:

- a stream reads or writes what another one wrote or reads, and no event orders them;
- a pinned buffer is used again before the host has waited for its former use;
- memory is given back while a stream that nobody told the allocator of may still use it;
- a graph is replayed whose memory was given back, other than that of its capture;
- the host waits, or copies from memory that is not pinned, inside a step.

A graph keeps the work that was asked of its stream, and each replay asks for it again.
"""

from __future__ import annotations

import contextlib
import functools
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from aserve.gpu.device.cuda.runtime import CudaEvent, CudaStream, Memory
from tests.fakes.gated_model import TIMEOUT_S

# WHY: torch makes the Python object of an operator when it is first asked for, keeps its address
# without holding it, and throws it away where two threads make it at once. A dispatch mode of the
# second thread is then called with freed memory.
for _name in torch._C._dispatch_get_all_op_names():
    _operator, _, _overload = _name.removeprefix("aten::").partition(".")
    if _name.startswith("aten::") and hasattr(torch.ops.aten, _operator):
        getattr(getattr(torch.ops.aten, _operator), _overload or "default", None)

META = torch.device("meta")
CPU = torch.device("cpu")
GARBAGE = 0x7B  # each byte of what nobody has written yet
EMPTY = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
SWEEP = 64  # pieces of work that chance runs at once, at most

Clock = dict[int, int]  # how far each stream has come


class Hazard(AssertionError):
    """What goes wrong on a GPU, sometimes."""


@dataclass(eq=False)
class Block:
    """The memory of one storage: its values, and who used it last."""

    name: str
    values: torch.UntypedStorage
    owner: Stream | None  # None: pinned memory of the host
    is_pooled: bool = False  # allocated in a capture, so only graphs get it again
    is_freed: bool = False
    writer: tuple[int, int] | None = None  # stream and place in it
    readers: Clock = field(default_factory=dict)
    kept_for: set[int] = field(default_factory=set)
    copied: Tensor | None = None  # of pinned memory: what was in it when a copy was asked for

    def uses(self) -> Iterator[tuple[int, int]]:
        yield from self.readers.items()
        if self.writer is not None:
            yield self.writer


class Stream:
    """Work in order. `clock` is what the next piece of work is ordered behind."""

    def __init__(self, cuda: FakeCuda, number: int) -> None:
        self.number = number
        self.clock: Clock = {number: 0}
        self.num_done = 0
        self.queue: deque[Callable[[], object]] = deque()
        self.graph: Graph | None = None  # that is being captured
        self._cuda = cuda

    def record_event(self, event: CudaEvent) -> None:
        with self._cuda.lock:
            self._cuda.check_alive()
            self._check_captures_nothing()
            cast(Event, event).clock = dict(self.clock)

    def wait_event(self, event: CudaEvent) -> None:
        with self._cuda.lock:
            self._cuda.check_alive()
            self._check_captures_nothing()
            self.wait(cast(Event, event).clock)

    def wait_stream(self, stream: CudaStream) -> None:
        with self._cuda.lock:
            self.wait(dict(cast(Stream, stream).clock))

    def wait(self, clock: Clock) -> None:
        join(self.clock, clock)
        self._cuda.enqueue(self, functools.partial(self._cuda.run_until, clock))

    def _check_captures_nothing(self) -> None:
        if self.graph is not None:
            raise RuntimeError("operation not permitted when stream is capturing")


@dataclass(frozen=True)
class Work:
    """What an operator or a copy does, and to which memory."""

    what: str
    reads: list[Block]
    writes: list[Block]
    run: Callable[[], object]


class Graph:
    """Implements CudaGraph."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.work: list[Work] = []
        self._cuda = cuda
        self._stream: Stream | None = None

    def begin(self) -> None:
        stream = self._cuda.current_stream()
        assert stream.number != 0, "the default stream cannot be captured"
        assert stream.graph is None, "one capture at a time"
        stream.graph, self._stream = self, stream

    def end(self) -> None:
        assert self._stream is not None
        assert self._stream.graph is self, "another graph is being captured"
        self._stream.graph = None

    def abandon(self) -> None:
        self.end()
        self.work.clear()

    def replay(self) -> None:
        self._cuda.num_replays += 1
        for work in self.work:
            self._cuda.check_is_there(work)
            self._cuda.ask(work)


class Event:
    """Done when nothing was put before it, as CUDA's."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.clock: Clock = {}
        self._cuda = cuda

    def synchronize(self) -> None:
        self._cuda.host_waits(self.clock)


class FakeCuda:
    """Implements CudaRuntime. With a seed, chance runs some of the work early."""

    def __init__(self, seed: int | None = None) -> None:
        self.about = "no GPU"
        self.torch_device = META
        self.has_bfloat16 = True
        self.has_fp8 = True
        self.lock = threading.RLock()
        self.hazards: list[str] = []
        self.num_synchronised = 0
        self.num_replays = 0
        self.memory_now = Memory(free=1 << 30, total=1 << 30)
        self.growth_bytes = 0  # what a run is said to take
        self.steps_may_wait = False  # a step of the host for an event
        self.lets_host_go = threading.Event()  # no wait of the host ends before
        self.lets_host_go.set()
        self._chance = None if seed is None else random.Random(seed)
        self._streams = [Stream(self, 0)]
        self._blocks: dict[int, Block] = {}  # by storage
        self._pinned: dict[int, Block] = {}
        self._freed: deque[Block] = deque()
        self._known: Clock = {}  # what the host has waited for
        self._fault: str | None = None
        self._thread = _Thread()

    # ------------------------------------------------------------ the runtime's protocol

    def current_stream(self) -> Stream:
        return self._thread.streams[-1] if self._thread.streams else self._streams[0]

    def new_stream(self) -> Stream:
        self._streams.append(Stream(self, len(self._streams)))
        return self._streams[-1]

    @contextmanager
    def on(self, stream: CudaStream) -> Iterator[None]:
        streams = self._thread.streams
        streams.append(cast(Stream, stream))
        try:
            if len(streams) > 1:
                yield
            else:
                with _Dispatch(self):
                    yield
        finally:
            streams.pop()

    def new_event(self) -> Event:
        return Event(self)

    def new_graph(self) -> Graph:
        return Graph(self)

    def pinned(self, num_words: int) -> Tensor:
        buffer = torch.full((num_words,), GARBAGE, dtype=torch.int32)
        storage = buffer.untyped_storage()
        block = Block(f"a pinned buffer of {num_words} words", storage, owner=None)
        self._pinned[storage._cdata] = block
        return buffer

    def keep(self, tensor: Tensor, stream: CudaStream) -> None:
        self._block(tensor).kept_for.add(cast(Stream, stream).number)

    def memory(self) -> Memory:
        return self.memory_now

    def growth(self, run: Callable[[], None]) -> int:
        run()
        return self.growth_bytes

    def synchronize(self) -> None:
        """Not a hazard: a capture may, but no step."""
        self.num_synchronised += 1
        with self.lock:
            self.check_alive()
            self.run_until({stream.number: stream.clock[stream.number] for stream in self._streams})

    # ------------------------------------------------------------ for tests

    def __enter__(self) -> FakeCuda:
        """For what loads a model: there the host may wait."""
        self._loading = self.on(self._streams[0])
        self._loading.__enter__()
        return self

    def __exit__(self, *_error: object) -> None:
        self._loading.__exit__(None, None, None)

    def read(self, tensor: Tensor) -> Tensor:
        """The values that the tensor has at the end of all that was asked for."""
        with self.lock:
            for stream in self._streams:
                self.run_until({stream.number: stream.clock[stream.number]})
            return self._twin(tensor).clone()

    def break_down(self, fault: str) -> None:
        """From now on every call fails, as on a device that a kernel has ruined."""
        self._fault = fault

    def assert_sound(self) -> None:
        with self.lock:
            self._collect()
        assert not self.hazards, "\n".join(self.hazards)

    # ------------------------------------------------------------ streams and events

    def check_alive(self) -> None:
        if self._fault is not None:
            raise torch.AcceleratorError(f"CUDA error: {self._fault}")

    def host_waits(self, clock: Clock) -> None:
        is_hazard = self._is_in_step() and not self.steps_may_wait
        if is_hazard and any(self._past(n) < place for n, place in clock.items()):
            self.report("the host waits for an event inside a step")
        assert self.lets_host_go.wait(TIMEOUT_S)
        with self.lock:
            self.check_alive()
            self.run_until(clock)
            join(self._known, clock)

    def report(self, hazard: str) -> None:
        self.hazards.append(hazard)
        raise Hazard(hazard)

    def enqueue(self, stream: Stream, work: Callable[[], object]) -> None:
        stream.queue.append(work)
        stream.clock[stream.number] += 1
        if self._chance is not None and self._chance.random() < 1 / SWEEP:
            lucky = self._chance.choice(self._streams)
            until = lucky.num_done + self._chance.randint(1, 4 * SWEEP)
            self.run_until({lucky.number: min(until, lucky.clock[lucky.number])})

    def run_until(self, clock: Clock) -> None:
        for number, place in clock.items():
            stream = self._streams[number]
            while stream.num_done < place:
                work = stream.queue.popleft()
                stream.num_done += 1
                with torch.inference_mode(), contextlib.ExitStack() as garbage:
                    if self.hazards:  # what was raced for may be no index
                        garbage.enter_context(contextlib.suppress(IndexError))
                    work()

    def _is_in_step(self) -> bool:
        return threading.current_thread().name == "aserve-executor"

    # ------------------------------------------------------------ operators

    def dispatch(self, op: Any, args: Any, kwargs: Any) -> Any:
        inputs = list(tensors_in((args, kwargs)))
        with self.lock:
            self._collect()
            if op is torch.ops.aten.copy_.default:
                return self._copy(args[0], args[1], is_async=_is_async(args, kwargs))
            outputs = op(*args, **kwargs)
            made = list(tensors_in(outputs))
            if not any(tensor.is_meta for tensor in (*inputs, *made)):
                return outputs
            self.check_alive()
            self._ask_operator(op, (args, kwargs), inputs, made)
            return outputs

    def ask(self, work: Work) -> None:
        with self.lock:
            self.check_alive()
            stream = self.current_stream()
            if stream.graph is not None:
                stream.graph.work.append(work)
                return
            self._order(stream, work)
            self.enqueue(stream, work.run)

    def check_is_there(self, work: Work) -> None:
        for block in (*work.reads, *work.writes):
            if block.is_freed and not block.is_pooled:
                self.report(f"a graph replays {work.what} with {block.name}, which was given back")

    def _ask_operator(
        self, op: Any, arguments: Any, inputs: list[Tensor], made: list[Tensor]
    ) -> None:
        hosted = [tensor for tensor in inputs if not tensor.is_meta and tensor.dim() > 0]
        if hosted:
            self._blocking_copy(f"{op} takes {tuple(hosted[0].shape)} from the host")
        known = {tensor.untyped_storage()._cdata for tensor in inputs if tensor.is_meta}
        new = [tensor for tensor in made if tensor.untyped_storage()._cdata not in known]
        written = _written(op, arguments)
        if not new and not written:
            return  # a view
        reads = [self._block(tensor) for tensor in inputs if tensor.is_meta]
        writes = [self._block(tensor) for tensor in written]
        writes += [self._allocate(tensor, str(op)) for tensor in new]
        if op.overloadpacket.__name__ in EMPTY:
            return
        twins = self._on_cpu(arguments)
        targets = [self._twin(tensor) for tensor in new]
        places = [place for place, tensor in enumerate(made) if any(tensor is t for t in new)]

        def run() -> None:
            real = list(tensors_in(op(*twins[0], **twins[1])))
            for target, place in zip(targets, places, strict=True):
                target.copy_(real[place])

        self.ask(Work(str(op), reads, writes, run))

    def _copy(self, target: Tensor, source: Tensor, *, is_async: bool) -> Tensor:
        if not target.is_meta and not source.is_meta:
            return target.copy_(source)
        self.check_alive()
        blocks = [self._find(tensor) for tensor in (target, source)]
        if None in blocks or (not is_async and None in [b and b.owner for b in blocks]):
            self._blocking_copy(f"a copy of {tuple(source.shape)} to {tuple(target.shape)}")
        writes, reads = ([block] if block else [] for block in blocks)
        for block in (*reads, *writes):
            if block.owner is None:
                self._check_is_free(block, is_read=block in reads)
        if self.current_stream().graph is not None and not (target.is_meta and source.is_meta):
            self.report("a copy from or to the host is captured")
        real_target, real_source = self._on_cpu(target), self._on_cpu(source)
        if not target.is_meta:
            target.fill_(GARBAGE)  # what a host sees that does not wait
        elif blocks[1] is None:
            real_source = real_source.clone()  # from here on the host may change it
        self.ask(Work("a copy", reads, writes, functools.partial(real_target.copy_, real_source)))
        if not is_async and not target.is_meta:  # the host waits for the values
            self.run_until(dict(self.current_stream().clock))
        return target

    def _order(self, stream: Stream, work: Work) -> None:
        place = stream.clock[stream.number] + 1
        what = f"{work.what} on stream {stream.number}"
        for block in (*work.reads, *work.writes):
            if block.writer and not self._is_before(block.writer, stream):
                self.report(f"{what} races the write of {block.name}")
        for block in work.writes:
            for reader in block.readers.items():
                if not self._is_before(reader, stream):
                    self.report(f"{what} races a read of {block.name}")
            block.writer = stream.number, place
        for block in work.reads:
            block.readers[stream.number] = place

    def _is_before(self, use: tuple[int, int], stream: Stream) -> bool:
        """Whether the use is over before the stream's next work begins."""
        number, place = use
        return number == stream.number or max(stream.clock.get(number, 0), self._past(number)) >= (
            place
        )

    def _past(self, number: int) -> int:
        return self._known.get(number, 0)

    def _check_is_free(self, block: Block, *, is_read: bool) -> None:
        """What was copied from may be so again, as long as nobody has written there."""
        values = torch.empty(0, dtype=torch.uint8).set_(block.values)
        is_in_use = any(self._past(number) < place for number, place in block.uses())
        is_as_before = is_read and block.copied is not None and torch.equal(block.copied, values)
        if is_in_use and not is_as_before:
            self.report(f"{block.name} is used again before its event")
        block.copied = values.clone() if is_read else None

    def _blocking_copy(self, what: str) -> None:
        """From or to memory that is not pinned: the host waits until it is done."""
        if self._is_in_step():
            self.report(f"{what}, inside a step: the host waits")

    # ------------------------------------------------------------ memory

    def _allocate(self, tensor: Tensor, op: str) -> Block:
        storage = tensor.untyped_storage()
        values = torch.full((storage.nbytes(),), GARBAGE, dtype=torch.uint8).untyped_storage()
        stream = self.current_stream()
        block = Block(
            f"what {op} made, {tuple(tensor.shape)}",
            values,
            owner=stream,
            is_pooled=stream.graph is not None,
        )
        self._blocks[storage._cdata] = block
        weakref.finalize(storage, self._on_free, storage._cdata, block).atexit = False
        return block

    def _on_free(self, key: int, block: Block) -> None:
        """NOTE: called wherever a last reference goes, so it takes no lock."""
        if self._blocks.get(key) is block:
            del self._blocks[key]
        block.is_freed = True
        self._freed.append(block)

    def _collect(self) -> None:
        while self._freed:
            block = self._freed.popleft()
            assert block.owner is not None
            for use in block.uses():
                is_kept = use[0] in block.kept_for
                if not is_kept and not self._is_before(use, block.owner):
                    self.hazards.append(
                        f"{block.name} is given back while stream {use[0]} may still use it"
                    )

    def _find(self, tensor: Tensor) -> Block | None:
        """None: memory of the host that is not pinned."""
        return self._block(tensor) if tensor.is_meta else self._pinned.get(_key(tensor))

    def _block(self, tensor: Tensor) -> Block:
        block = self._blocks.get(_key(tensor))
        if block is None:
            self._blocking_copy(f"a tensor {tuple(tensor.shape)} was made of values of the host")
            raise Hazard("a tensor was made of the host's values: not even loading does that")
        return block

    def _twin(self, tensor: Tensor) -> Tensor:
        """Its values, in the same layout."""
        place = tensor.storage_offset(), tensor.size(), tensor.stride()
        return torch.empty(0, dtype=tensor.dtype).set_(self._block(tensor).values, *place)

    def _on_cpu(self, value: Any) -> Any:
        """Operators take tensors, and lists of tensors."""
        match value:
            case Tensor():
                return self._twin(value) if value.is_meta else value
            case torch.device():
                return CPU if value == META else value
            case list() | tuple():
                return [self._on_cpu(item) for item in value]
            case dict():
                return {key: self._on_cpu(item) for key, item in value.items()}
            case _:
                return value


class _Thread(threading.local):
    def __init__(self) -> None:
        self.streams: list[Stream] = []


class _Dispatch(TorchDispatchMode):
    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._cuda.dispatch(func, args, kwargs or {})


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def join(clock: Clock, other: Clock) -> None:
    for number, place in other.items():
        clock[number] = max(clock.get(number, 0), place)


def _key(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def _is_async(args: Any, kwargs: Any) -> bool:
    return bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))


def _written(op: Any, arguments: Any) -> list[Tensor]:
    """The inputs that an operator changes."""
    args, kwargs = arguments
    found: list[Tensor] = []
    for place, spec in enumerate(op._schema.arguments):
        if spec.alias_info is None or not spec.alias_info.is_write:
            continue
        given = args[place] if place < len(args) else kwargs.get(spec.name)
        found += tensors_in(given)
    return found
