"""Joins ranks on CUDA: NCCL for tensors, gloo for numbers of the host, and symmetric memory for
short sums where all devices read each other's memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import Backend, _register_process_group, _SymmetricMemory
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import GroupName

from aserve.config import set_environment
from aserve.errors import ConfigError
from aserve.gpu.parallel.all_reduce import BUFFER_BYTES, AllReduce, GatheredSum, symmetric_sums
from aserve.gpu.parallel.collectives import COLLECTIVE_S, Collectives, GroupCollectives
from aserve.gpu.parallel.device_collectives import (
    DeviceCollectives,
    DeviceGroup,
    GroupLink,
    Peer,
    Sending,
)
from aserve.gpu.parallel.flashinfer_sums import flashinfer_sum_norm
from aserve.gpu.parallel.meeting import store_of
from aserve.gpu.parallel.pipe import neighbours
from aserve.gpu.parallel.rank_watch import RankWatch
from aserve.parallel.topology import Coordinates, Patience, RankLost

NUM_PROBED = 4096  # elements of a sum that is tried

logger = logging.getLogger(__name__)


def join_by_nccl(
    place: Coordinates,
    patience: Patience,
    device: torch.device,
    *,
    is_deterministic: bool = False,
    uses_peers: bool = True,
) -> tuple[DeviceCollectives, RankWatch]:
    """Meets the other ranks, each with a device of its own. `uses_peers` lets them sum through each
    other's memory."""
    host = GroupCollectives(place, patience)
    group = nccl_group(place)
    watch = RankWatch(place, patience, group.abort)
    host.least(0)
    watch.start()
    plain = DeviceCollectives(host, group)
    try:
        with watch.waiting():
            is_right = sums_right(plain.sum, plain, device)
    except RuntimeError as error:
        raise RankLost(f"the ranks did not meet by NCCL: {error}") from error
    if not is_right:
        raise RankLost("NCCL has summed wrongly; `aserve doctor` shows the links between the GPUs")
    ways: Sequence[AllReduce] = ()
    if is_deterministic:
        ways = (GatheredSum(plain.gather),)
    elif uses_peers and place.num_ranks > 1:
        with watch.waiting():
            ways = _peer_sums(place, plain, group, device)
    logger.info("ranks sum by %s", ", ".join([*(way.name for way in ways), "NCCL"]))
    ranks = DeviceCollectives(host, group, ways)
    ranks.waiting = watch.waiting
    if ways and not is_deterministic:
        ranks.make_fused = lambda size, dtype: flashinfer_sum_norm(ranks, host, size, device, dtype)
    return ranks, watch


def link_by_nccl(
    place: Coordinates,
    patience: Patience,
    device: torch.device,
    world: Collectives,
    *,
    sending: Sending,
) -> tuple[GroupLink, RankWatch]:
    """Meets the ranks of the stages before and after this one. All ranks of `world` do so together.
    The watch is for all of them.

    NOTE: in a ring of two, both directions are between the same two ranks, so the way back from the
    last stage to the first one has a group of its own.
    """
    groups = [nccl_group(place.among_all, name=name) for name in ("nccl", "nccl-back")]

    def abort() -> None:
        for group in groups:
            group.abort()

    watch = RankWatch(place.among_all, patience, abort)
    world.least(0)
    watch.start()
    forth, back = groups
    before, after = neighbours(place)
    link = GroupLink(
        device,
        before=Peer(back if place.stage == 0 else forth, before),
        after=Peer(back if place.is_last_stage else forth, after),
        sending=sending,
    )
    try:
        with watch.waiting():
            is_right = link.is_right(place.rank, is_first=place.stage == 0)
    except RuntimeError as error:
        raise RankLost(f"the stages did not meet by NCCL: {error}") from error
    if not is_right:
        raise RankLost("NCCL has sent wrongly; `aserve doctor` shows the links between the GPUs")
    return link, watch


def nccl_group(place: Coordinates, *, name: str = "nccl") -> DeviceGroup:
    # See rank_watch.py: the watch does what torch's would do by the end of the process.
    set_environment("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", wins=True)
    try:
        from torch.distributed import ProcessGroupNCCL
    except ImportError:
        raise ConfigError(
            f"torch {torch.__version__} is built without NCCL, which joins ranks on CUDA; install "
            "a build that has it, or leave out --tensor-parallel-size",
            param="tensor_parallel_size",
        ) from None
    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=COLLECTIVE_S)
    store = store_of(place, name)
    return cast(DeviceGroup, ProcessGroupNCCL(store, place.rank, place.num_ranks, options))


def sums_right(sum_: Callable[[Tensor], Tensor], ranks: Collectives, device: torch.device) -> bool:
    """Returns whether all ranks get 1 + 2 + ... + n of the numbers of n ranks. It blocks."""
    x = torch.full((NUM_PROBED,), ranks.rank + 1.0, device=device)
    expected = ranks.num_ranks * (ranks.num_ranks + 1) / 2
    return bool((sum_(x) == expected).all())


def _peer_sums(
    place: Coordinates, ranks: DeviceCollectives, group: DeviceGroup, device: torch.device
) -> Sequence[AllReduce]:
    """Returns the ways through the memory of other ranks that all ranks can go."""
    name = GroupName(f"symmetric-{place.store}")
    buffer = _symmetric_buffer(place, group, device, name) if _has_peers(place, device) else None
    if not ranks.least(buffer is not None) or buffer is None:
        return ()
    ways = symmetric_sums(buffer, name, place.num_ranks)
    return [way for way in ways if ranks.least(sums_right(way, ranks, device))]


def _has_peers(place: Coordinates, device: torch.device) -> bool:
    """Whether this rank's device reads the memory of all others."""
    if place.cluster is not None:
        return False
    first = device.index - place.rank
    others = [first + rank for rank in range(place.num_ranks) if rank != place.rank]
    return all(torch.cuda.can_device_access_peer(device.index, other) for other in others)


def _symmetric_buffer(
    place: Coordinates, group: DeviceGroup, device: torch.device, name: GroupName
) -> Tensor | None:
    """uint8 [BUFFER_BYTES] that all ranks map. None: the driver refuses."""
    register_group(place, group, device, name)
    try:
        buffer = _SymmetricMemory.empty_strided_p2p((BUFFER_BYTES,), (1,), torch.uint8, device)
        _SymmetricMemory.rendezvous(buffer, name)
    except RuntimeError as error:
        logger.warning("the GPUs do not map each other's memory, so NCCL sums alone: %s", error)
        return None
    return buffer


def register_group(
    place: Coordinates, group: DeviceGroup, device: torch.device, name: GroupName
) -> ProcessGroup:
    """Makes the group known by name to torch's operators, and returns torch's view of it."""
    known = ProcessGroup(store_of(place, "symmetric"), place.rank, place.num_ranks)
    kind = ProcessGroup.BackendType.NCCL if device.type == "cuda" else ProcessGroup.BackendType.GLOO
    known._register_backend(device, kind, cast(Backend, group))
    known._set_group_name(name)
    _register_process_group(name, known)
    return known
