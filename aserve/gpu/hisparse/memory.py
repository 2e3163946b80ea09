"""The memory of HiSparse: where the host's pools lie, and how many pages there are."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from aserve.cache.layout import GroupLayout
from aserve.errors import ConfigError
from aserve.gpu.device.base import Device
from aserve.gpu.hisparse.hot_rows import CopyRows, HotShape, copy_rows
from aserve.gpu.kv.pools import Zeros
from aserve.gpu.kv.store import byte_view
from aserve.host.limits import available_memory_bytes

HOST_PART = 2  # the pools take at most 1 / HOST_PART of the host's free memory


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Memory of the host that a device reads and writes."""

    zeros: Zeros
    copy: CopyRows
    is_shared: bool  # the device has no memory of its own


def host_memory(device: Device) -> HostMemory:
    match device.torch_device.type:
        case "cpu":
            return HostMemory(device.zeros, copy_rows, is_shared=True)
        case "cuda":
            from aserve.gpu.device.cuda.runtime import pinned_zeros
            from aserve_kernels.copy_rows import copy_rows as copy_on_device

            def copy(source: Tensor, source_rows: Tensor, target: Tensor, rows: Tensor) -> None:
                copy_on_device(byte_view(source), source_rows, byte_view(target), rows)

            return HostMemory(pinned_zeros, copy, is_shared=False)
        case other:
            raise ConfigError(
                f"--enable-hisparse does not support the device {other}; leave it out",
                param="enable_hisparse",
            )


def kv_budget(
    budget_bytes: int,
    layout: GroupLayout,
    *,
    shape: HotShape,
    ratio: float,
    memory: HostMemory,
) -> int:
    """Returns the bytes of all pages, on the host and on the device together, where the device has
    `budget_bytes` for hot rows, index keys and token ids. The host has at most `ratio` times as
    much memory for KV as is left of it."""
    left = max(0, budget_bytes - (shape.max_rows + 1) * row_bytes(layout, shape))
    if memory.is_shared:
        return left
    of_host = layout.bytes_per_token
    in_all = layout.bytes_per_page(1)
    host_bytes = min(left * ratio, available_memory_bytes() // HOST_PART)
    return int(min(left / (in_all - of_host), host_bytes / of_host) * in_all)


def row_bytes(layout: GroupLayout, shape: HotShape) -> int:
    """Returns the bytes on the device of one request's hot rows."""
    return shape.num_columns * (layout.bytes_per_token + 16 * layout.num_layers)
