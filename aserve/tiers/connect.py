"""Opens the tiers below the prefix cache that the options ask for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

from aserve.actors.scheduler import KvEvent, PeerEvent
from aserve.actors.supervisor import Supervised
from aserve.cache.page_keys import split_keys
from aserve.channel import Sink
from aserve.config import Resolved
from aserve.disagg.connect import HasKv, Transfers, name_of_model
from aserve.errors import BugError, ConfigError
from aserve.host.limits import available_memory_bytes
from aserve.messages.base import GIB
from aserve.messages.changes import Amend
from aserve.messages.executor import EngineSpec, SchedulerEvent
from aserve.messages.output import Refused, Retired
from aserve.messages.requests import AdmitRequest, Cancel, FailRequest
from aserve.messages.transfers import KvAccess, LoadKv, SaveKv
from aserve.observability.reports import TierUsed
from aserve.tiers.actor import KvTiers
from aserve.tiers.host_pages import HostPages
from aserve.tiers.page_files import PageFiles, open_folder
from aserve.tiers.page_layout import PageLayout

FLAG = "--enable-hierarchical-cache"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KvPort:
    """The scheduler's port for KV: tiers, or transfers between engines, or both."""

    tiers: KvTiers | None
    transfers: Sink[PeerEvent] | None

    def send(self, effect: KvEvent) -> None:
        if isinstance(effect, SaveKv | LoadKv):
            if self.tiers is None:
                raise BugError(f"there are no tiers for {effect}")
            self.tiers.send(effect)
        elif self.transfers is not None:
            self.transfers.send(effect)
        elif not isinstance(effect, Retired | Refused):
            raise BugError(f"no other engine for request {effect.request_id}")


class Lookups:
    """The scheduler's inbox for requests: each waits until the files have been looked through for
    its prompt, and so do the messages about it that come meanwhile.
    """

    def __init__(self, tiers: KvTiers, requests: Sink[SchedulerEvent]) -> None:
        self._tiers = tiers
        self._requests = requests
        self._held: dict[str, list[SchedulerEvent]] = {}

    def send(self, message: SchedulerEvent) -> None:
        match message:
            case AdmitRequest() if message.page_keys and message.is_causal:
                self._held[message.request_id] = [message]
                self._tiers.spawn(self._look(message))
            case Cancel() | Amend() | FailRequest() if message.request_id in self._held:
                self._held[message.request_id].append(message)
            case _:
                self._requests.send(message)

    async def _look(self, request: AdmitRequest) -> None:
        try:
            await self._tiers.look(split_keys(request.page_keys))
        finally:
            for message in self._held.pop(request.request_id):
                self._requests.send(message)


@dataclass(frozen=True, slots=True)
class Tiers:
    """Takes the place of `Transfers`, with the tiers beside it."""

    requests: Sink[SchedulerEvent]
    kv: Sink[KvEvent] | None
    actors: tuple[Supervised, ...]


def open_tiers(
    executor: object,
    resolved: Resolved,
    transfers: Transfers,
    *,
    events: Sink[SchedulerEvent],
    report: Callable[[TierUsed], None],
) -> Tiers:
    """Raises ConfigError if the options do not fit together, or if there is not enough memory."""
    if resolved.kv.tier_policy == "off":
        kv = None if transfers.kv is None else KvPort(None, transfers.kv)
        return Tiers(transfers.requests, kv, transfers.actors)
    if not isinstance(executor, HasKv) or resolved.num_processes > 1:
        raise ConfigError(
            f"{FLAG} needs an engine of one rank whose device can copy KV to host memory, not "
            f"--device {resolved.machine.device} with {resolved.num_ranks} ranks and "
            f"{resolved.machine.pipeline_parallel_size} pipeline stages"
        )
    spec = executor.spec
    _check(spec, resolved)
    access = executor.kv_access()
    layout = PageLayout(access.pool_shapes, page_size=spec.page_size)
    host = HostPages(_max_pages(resolved, spec, layout.page_bytes), page_bytes=layout.page_bytes)
    files = _files(resolved, spec, access, layout)
    tiers = KvTiers(access, layout, host, events=events, report=report, files=files)
    requests = transfers.requests if files is None else Lookups(tiers, transfers.requests)
    return Tiers(requests, KvPort(tiers, transfers.kv), (*transfers.actors, tiers))


def _files(
    resolved: Resolved, spec: EngineSpec, access: KvAccess, layout: PageLayout
) -> PageFiles | None:
    """Opens the folder of all engines whose KV is the same for the same tokens."""
    place = resolved.kv.hicache_storage
    if place is None:
        return None
    same = (
        *(name_of_model(resolved, spec), access.geometry, layout.page_size),
        *(resolved.model.dtype, resolved.speculative),
    )
    name = blake2b(repr(same).encode(), digest_size=16).hexdigest()
    logger.info("pages are kept in %s/%s", place, name)
    size = resolved.kv.hicache_storage_size
    max_bytes = None if size is None else int(size * GIB)
    return PageFiles(open_folder(place, name, max_bytes), page_bytes=layout.page_bytes)


def _check(spec: EngineSpec, resolved: Resolved) -> None:
    if spec.task != "generate" or not spec.decode.root_len or spec.decode.is_recurrent:
        raise ConfigError(
            f"{FLAG} is for models that generate token by token and keep nothing but KV, not for "
            "diffusion, embedding or classifying models, nor for models with recurrent layers"
        )
    if not spec.prefix_cache:
        raise ConfigError(f"{FLAG} needs the prefix cache: leave out --no-prefix-cache")
    if spec.dp_size > 1:
        raise ConfigError(f"{FLAG} is for one data-parallel rank, not for {spec.dp_size}")
    if resolved.disaggregation.disaggregation_mode == "decode":
        raise ConfigError(
            f"{FLAG} and --disaggregation-mode decode: the KV of a prompt comes from one place; "
            "give the option to the prefill engines"
        )


def _max_pages(resolved: Resolved, spec: EngineSpec, page_bytes: int) -> int:
    """Returns how many pages host memory holds."""
    options, available = resolved.kv, available_memory_bytes()
    if options.hicache_size is None:
        num_bytes = int(options.hicache_ratio * spec.groups[0].num_pages * page_bytes)
        num_bytes = min(num_bytes, available // 2)
    else:
        num_bytes = int(options.hicache_size * GIB)
    if not page_bytes <= num_bytes <= available:
        raise ConfigError(
            f"--hicache-size: {num_bytes / GIB:.3f} GiB of host memory for KV, but a page takes "
            f"{page_bytes / GIB:.6f} GiB, and {available / GIB:.1f} GiB are free; ask for a size "
            "between them"
        )
    logger.info(
        "host memory below the prefix cache: %d pages, %.2f GiB",
        num_bytes // page_bytes,
        num_bytes / GIB,
    )
    return num_bytes // page_bytes
