"""The registry of rank backends: each joins the ranks whose tensors are on one type of device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from aserve.errors import ConfigError
from aserve.gpu.device.base import Device
from aserve.gpu.device.cuda.device import CudaDevice
from aserve.gpu.parallel.collectives import ALONE, Collectives, collectives_of
from aserve.gpu.parallel.pipe import DeviceLink
from aserve.parallel.topology import Coordinates, Patience


@dataclass(frozen=True, slots=True)
class JoinOptions:
    is_deterministic: bool = False
    uses_peers: bool = True  # sums may go through the memory of other ranks' devices


class Join(Protocol):
    """Meets the other ranks of a stage. Raises RankLost if they do not come."""

    def __call__(
        self, device: Device, place: Coordinates, patience: Patience, options: JoinOptions, /
    ) -> Collectives: ...


class OpenLink(Protocol):
    """Meets the neighbouring stages, together with all ranks of `world`. Raises RankLost."""

    def __call__(
        self, device: Device, place: Coordinates, patience: Patience, world: Collectives, /
    ) -> DeviceLink: ...


@dataclass(frozen=True, slots=True)
class RankBackend:
    join: Join
    shares_memory: bool  # the ranks of a machine share the device's memory
    open_link: OpenLink | None = None  # None: tensors are on the host, and sockets carry them


def join_on_host(
    _device: Device, place: Coordinates, patience: Patience, _options: JoinOptions, /
) -> Collectives:
    return collectives_of(place, patience)


def join_on_cuda(
    device: Device, place: Coordinates, patience: Patience, options: JoinOptions, /
) -> Collectives:
    from aserve.gpu.parallel.nccl import join_by_nccl

    assert isinstance(device, CudaDevice)
    ranks, watch = join_by_nccl(
        place,
        patience,
        device.torch_device,
        is_deterministic=options.is_deterministic,
        uses_peers=options.uses_peers,
    )
    device.watch_waits(watch.waiting)
    return ranks


def link_on_cuda(
    device: Device, place: Coordinates, patience: Patience, world: Collectives, /
) -> DeviceLink:
    from aserve.gpu.parallel.nccl import link_by_nccl

    assert isinstance(device, CudaDevice)
    sending = device.side_stream().reading
    link, watch = link_by_nccl(place, patience, device.torch_device, world, sending=sending)
    device.watch_waits(watch.waiting)
    return link


# By the type of torch's device.
BACKENDS: Mapping[str, RankBackend] = {
    "cpu": RankBackend(join_on_host, shares_memory=True),
    "cuda": RankBackend(join_on_cuda, shares_memory=False, open_link=link_on_cuda),
}


def rank_backend(device: Device) -> RankBackend:
    """Raises ConfigError for a device on which an engine has one rank."""
    kind = device.torch_device.type
    if kind not in BACKENDS:
        raise ConfigError(
            f"a device of {kind} runs on one rank, and ranks on {' or '.join(BACKENDS)}; leave out "
            "--tensor-parallel-size, --expert-parallel-size and --pipeline-parallel-size",
            param="tensor_parallel_size",
        )
    return BACKENDS[kind]


def join_ranks(
    device: Device, place: Coordinates, patience: Patience, options: JoinOptions
) -> Collectives:
    """Meets the other ranks of a stage."""
    if place.is_alone:
        return ALONE
    return rank_backend(device).join(device, place, patience, options)
