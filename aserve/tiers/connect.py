"""Opens the tiers below the prefix cache that the options ask for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from aserve.actors.scheduler import KvEvent, PeerEvent
from aserve.actors.supervisor import Supervised
from aserve.channel import Sink
from aserve.config import Resolved
from aserve.disagg.connect import HasKv, Transfers
from aserve.errors import BugError, ConfigError
from aserve.host.limits import available_memory_bytes
from aserve.messages.executor import EngineSpec, SchedulerEvent
from aserve.messages.output import Refused, Retired
from aserve.messages.transfers import LoadKv, SaveKv
from aserve.observability.reports import TierUsed
from aserve.tiers.actor import KvTiers
from aserve.tiers.host_pages import HostPages
from aserve.tiers.page_layout import PageLayout

FLAG = "--enable-hierarchical-cache"
GIB = 1 << 30

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


@dataclass(frozen=True, slots=True)
class Tiers:
    """What `Transfers` has, with the tiers beside it."""

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
    """Raises ConfigError if the options do not fit together,
    or if there is not enough memory.
    """
    if resolved.kv.tier_policy == "off":
        kv = None if transfers.kv is None else KvPort(None, transfers.kv)
        return Tiers(kv, transfers.actors)
    if not isinstance(executor, HasKv):
        raise ConfigError(f"{FLAG}: the device {resolved.machine.device} cannot transfer KV")
    spec = executor.spec
    _check(spec, resolved)
    access = executor.kv_access()
    layout = PageLayout(access.pool_shapes, page_size=spec.page_size)
    host = HostPages(_max_pages(resolved, spec, layout.page_bytes), page_bytes=layout.page_bytes)
    tiers = KvTiers(access, layout, host, events=events, report=report)
    return Tiers(KvPort(tiers, transfers.kv), (*transfers.actors, tiers))


def _check(spec: EngineSpec, resolved: Resolved) -> None:
    if spec.task != "generate" or not spec.decode.root_len:
        raise ConfigError(
            f"{FLAG} is for models that generate token by token, not for diffusion, embedding or "
            "classifying models"
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
