"""`aserve bench cluster-sim` runs a cluster of up to hundreds of devices in virtual time.

Devices, links and the CPU time of routers are a cost model (`cluster_cost`). The schedulers of the
devices and the balancers of the routers are the real ones. Each device has a number of clients on
average, each of which sends its next request when its answer has ended. A client always uses the
same router; a router knows its own requests, and hears of the others from the replicas at each
probe, as in a real cluster.

Each size runs with enough routers, and with one.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from aserve.bench.cluster_cost import SimulatedRouter, routers_for, step_s
from aserve.bench.options import ClusterSimOptions, integers
from aserve.bench.result import BenchResult, Table, median, progress
from aserve.bench.step_driver import result_of
from aserve.config import Resolved, RouterOptions
from aserve.errors import BugError
from aserve.messages.base import array_i32
from aserve.messages.executor import EngineSpec, GroupSpec, SchedulerEvent
from aserve.messages.output import Refused, Retired, StepOutput
from aserve.messages.requests import AdmitRequest, SamplingParams
from aserve.messages.step import Launch
from aserve.router.balancer import Balancer
from aserve.router.policies import Demand
from aserve.router.prefixes import block_digests
from aserve.scheduling.scheduler import Scheduler

TITLE = "clusters"
VOCAB_SIZE = 32_000
PAGE_SIZE = 16
GROUPS_PER_DEVICE = 4  # shared prefixes, such as system prompts
PREFIX_LEN = 256
ROUTER_LOAD = 0.7  # of a core: beyond it a queue grows
GOAL_RATE = 20_000.0  # requests per second
WARM_UP = 0.25  # of the simulated time, which is not counted
NOTE = (
    "Virtual time: real schedulers and balancers; devices, links and the CPU of routers are the "
    "model of aserve/bench/cluster_cost.py. pick_us is the measured time of a decision."
)


@dataclass(frozen=True, slots=True)
class Found:
    """The figures of one run, of the time after the warm-up."""

    num_devices: int
    num_routers: int
    tokens_per_s: float
    requests_per_s: float
    hit_rate: float
    router_load: float  # busy share of the cores of the routers
    pick_us: float

    @property
    def per_device(self) -> float:
        return self.tokens_per_s / self.num_devices


def run(options: ClusterSimOptions, _resolved: Resolved) -> BenchResult:
    sizes = integers(options.devices, flag="--devices")
    enough: dict[int, Found] = {}
    alone: dict[int, Found] = {}
    rate, pick_us = 0.0, 0.0  # of the size before, for a device
    with progress(TITLE, 2 * len(sizes)) as done:
        for size in sizes:
            alone[size] = Cluster(options, size, 1).run()
            done()
            rate = rate or alone[size].requests_per_s / size
            pick_us = max(pick_us, alone[size].pick_us)
            count = math.ceil(routers_for(rate * size, options, pick_us=pick_us) / ROUTER_LOAD)
            enough[size] = alone[size] if count == 1 else Cluster(options, size, count).run()
            done()
    first, last = enough[sizes[0]], enough[sizes[-1]]
    cores = routers_for(GOAL_RATE, options, pick_us=last.pick_us)
    figures = {
        "tokens_per_s": {str(size): round(found.tokens_per_s, 1) for size, found in enough.items()},
        "per_device_over_one": {
            str(size): round(found.per_device / first.per_device, 4)
            for size, found in enough.items()
        },
        "one_router_over_one": {
            str(size): round(found.per_device / first.per_device, 4)
            for size, found in alone.items()
        },
        "routers": {str(size): found.num_routers for size, found in enough.items()},
        "pick_us": {str(size): round(found.pick_us, 1) for size, found in enough.items()},
        "routers_at_20000_requests_per_s": math.ceil(cores / ROUTER_LOAD),
        "curves": {
            "cluster": {size: found.per_device for size, found in enough.items()},
            "cluster-one-router": {size: found.per_device for size, found in alone.items()},
        },
    }
    runs = [*enough.values(), *(each for each in alone.values() if each.num_devices > 1)]
    return BenchResult(figures, (_table(runs, first),), (NOTE, _limit(options, alone, last)))


def _limit(options: ClusterSimOptions, alone: dict[int, Found], last: Found) -> str:
    """Says where the cluster stops scaling, and why."""
    rate = last.requests_per_s / last.num_devices
    cores = routers_for(rate, options, pick_us=last.pick_us)
    full = [str(size) for size, found in alone.items() if found.router_load > 0.95]
    return (
        f"One router is full at {math.floor(1 / cores)} devices "
        f"(with one, these sizes are bound by it: {', '.join(full) or 'none'}): "
        f"{options.chunk_us:g} us of CPU per streamed token. With more routers the time of a "
        f"decision is next, which grows with the devices: {last.pick_us:.0f} us at "
        f"{last.num_devices}."
    )


@dataclass(slots=True)
class Device:
    """A scheduler and the device behind it. `busy_until_s` is when the last launched step ends."""

    name: str
    scheduler: Scheduler
    inbox: list[SchedulerEvent] = field(default_factory=list)
    busy_until_s: float = 0.0
    is_awake: bool = False  # a tick is already due
    num_open: int = 0


@dataclass(slots=True)
class Client:
    number: int
    router: int
    device: str = ""
    demand: Demand = field(default_factory=Demand)


class Cluster:
    """One run. Events wait in a heap, ordered by virtual time."""

    def __init__(self, options: ClusterSimOptions, num_devices: int, num_routers: int) -> None:
        self._options = options
        self._numbers = np.random.default_rng((num_devices, options.seed))
        names = [str(number) for number in range(num_devices)]
        self._devices = {name: Device(name, Scheduler(_spec(options))) for name in names}
        cost_s = options.request_us / 1e6, options.chunk_us / 1e6
        self._routers = [SimulatedRouter(*cost_s) for _ in range(num_routers)]
        router_options = RouterOptions(policy=options.policy)
        self._balancers = [Balancer(router_options, names) for _ in range(num_routers)]
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._clients: dict[str, Client] = {}  # by the id of the open request
        shape = (GROUPS_PER_DEVICE * num_devices, PREFIX_LEN)
        self._prefixes = self._numbers.integers(VOCAB_SIZE, size=shape, dtype=np.int32)
        self._request_ids = itertools.count()
        self._num_tokens = self._num_answers = self._num_cached = self._num_prompt_tokens = 0
        self._picks_us: deque[float] = deque(maxlen=10_000)

    def run(self) -> Found:
        options, routers = self._options, self._routers
        self._begin_probes()
        for number in range(options.clients * len(self._devices)):
            client = Client(number, number % len(routers))
            start_s = options.warm_up_s * float(self._numbers.random())
            self._at(start_s, partial(self._ask, client))
        self._advance(WARM_UP * options.seconds)
        self._num_tokens = self._num_answers = self._num_cached = self._num_prompt_tokens = 0
        busy_s = sum(router.busy_s for router in routers)
        self._advance(options.seconds)
        counted_s = (1 - WARM_UP) * options.seconds
        return Found(
            num_devices=len(self._devices),
            num_routers=len(routers),
            tokens_per_s=self._num_tokens / counted_s,
            requests_per_s=self._num_answers / counted_s,
            hit_rate=self._num_cached / max(1, self._num_prompt_tokens),
            router_load=(sum(each.busy_s for each in routers) - busy_s) / counted_s / len(routers),
            pick_us=median(self._picks_us),
        )

    def _at(self, time_s: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), act))

    def _advance(self, until_s: float) -> None:
        while self._events[0][0] < until_s:
            now_s, _, act = heapq.heappop(self._events)
            act(now_s)

    def _begin_probes(self) -> None:
        """Each router hears the loads of all replicas at intervals. Routers that were started one
        after the other do not do so at the same moment.
        """
        for number, balancer in enumerate(self._balancers):
            self._hear(balancer)
            phase = number / len(self._balancers)
            self._at(phase * RouterOptions().health_interval, partial(self._probe, balancer))

    def _probe(self, balancer: Balancer, now_s: float) -> None:
        self._hear(balancer)
        self._at(now_s + RouterOptions().health_interval, partial(self._probe, balancer))

    def _hear(self, balancer: Balancer) -> None:
        for device in self._devices.values():
            balancer.probed(device.name, load=device.num_open)

    def _ask(self, client: Client, now_s: float) -> None:
        """The client's next request enters its router."""
        leaves_s = self._routers[client.router].pass_request(now_s)
        self._at(leaves_s, partial(self._send, client))

    def _send(self, client: Client, now_s: float) -> None:
        """The router chooses a device."""
        options = self._options
        prefix = self._prefixes[self._numbers.integers(len(self._prefixes))]
        own = self._numbers.integers(VOCAB_SIZE, size=options.input_len, dtype=np.int32)
        prompt = prefix.tobytes() + own.tobytes()
        balancer = self._balancers[client.router]
        client.demand = Demand(block_digests(prompt))
        start_ns = time.thread_time_ns()
        device = balancer.pick(client.demand)
        if device is None:
            raise BugError("the balancer found no device")
        balancer.start(device, client.demand)
        self._picks_us.append((time.thread_time_ns() - start_ns) / 1e3)
        client.device = device
        self._devices[device].num_open += 1
        request_id = str(next(self._request_ids))
        self._clients[request_id] = client
        max_tokens = int(self._numbers.integers(1, 2 * options.output_len))
        sampling = SamplingParams(seed=client.number, max_tokens=max_tokens)
        request = AdmitRequest(request_id, prompt, sampling)
        self._num_prompt_tokens += PREFIX_LEN + options.input_len
        arrives_s = now_s + options.link_us / 1e6
        self._at(arrives_s, partial(self._deliver, self._devices[device], request))

    def _deliver(self, device: Device, event: SchedulerEvent, now_s: float) -> None:
        """Gives the scheduler an event. A tick takes `host_us`, and all events until then."""
        device.inbox.append(event)
        if not device.is_awake:
            device.is_awake = True
            self._at(now_s + self._options.host_us / 1e6, partial(self._tick, device))

    def _tick(self, device: Device, now_s: float) -> None:
        device.is_awake = False
        events, device.inbox = device.inbox, []
        for effect in device.scheduler.step(events):
            match effect:
                case Launch(batches=(batch,)):
                    device.busy_until_s = max(device.busy_until_s, now_s) + step_s(batch)
                    result = result_of(batch, vocab_size=VOCAB_SIZE)
                    self._num_cached += batch.stats.num_cached_tokens
                    self._at(device.busy_until_s, partial(self._deliver, device, result))
                case StepOutput():
                    self._emit(effect, now_s)
                case Retired():
                    self._end(device, effect.request_id, now_s)
                case Refused():
                    raise BugError(effect.error.message)
                case _:
                    pass

    def _emit(self, output: StepOutput, now_s: float) -> None:
        """The tokens of a step go through the routers of their clients."""
        arrives_s = now_s + self._options.link_us / 1e6
        for each in output.outputs():
            count = len(array_i32(each.token_ids))
            self._num_tokens += count
            self._routers[self._clients[each.request_id].router].pass_chunks(arrives_s, count)

    def _end(self, device: Device, request_id: str, now_s: float) -> None:
        """The client has its answer when its router has done all that came before."""
        client = self._clients.pop(request_id)
        device.num_open -= 1
        self._num_answers += 1
        ends_s = self._routers[client.router].pass_chunks(now_s + self._options.link_us / 1e6, 1)

        def ended(now_s: float) -> None:
            self._balancers[client.router].end(client.device)
            self._ask(client, now_s)

        self._at(ends_s, ended)


def _spec(options: ClusterSimOptions) -> EngineSpec:
    """There are pages for all rows and for some prefixes of requests that have ended."""
    max_len = PREFIX_LEN + options.input_len + 2 * options.output_len
    max_rows = 2 * options.clients
    return EngineSpec(
        page_size=PAGE_SIZE,
        groups=(GroupSpec("full", 1 + 2 * max_rows * (max_len // PAGE_SIZE + 1)),),
        max_rows=max_rows,
        max_model_len=max_len,
        max_batched_tokens=8192,
        vocab_size=VOCAB_SIZE,
        max_waiting=1 << 16,
    )


def _table(runs: list[Found], first: Found) -> Table:
    columns = ("devices", "routers", "tok/s", "of one", "requests/s", "hits", "router", "pick us")
    rows = [
        (
            *(str(one.num_devices), str(one.num_routers), f"{one.tokens_per_s:,.0f}"),
            *(f"{one.per_device / first.per_device:.3f}", f"{one.requests_per_s:,.0f}"),
            *(f"{one.hit_rate:.3f}", f"{one.router_load:.2f}", f"{one.pick_us:.1f}"),
        )
        for one in runs
    ]
    return Table("cluster in virtual time", columns, rows)
