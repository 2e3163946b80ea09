"""The devices by name. A new device is a folder beside this file and a row in `DEVICES`.

A row opens a device; the device itself makes its operators and its fused step (`Device.ops`) and
chooses the format of the weights (`Device.weight_format`).

A package outside of this tree registers a device by an entry point of the group `aserve.devices`,
whose name is that of the device and whose object is an `OpenDevice`. Its attention backends are
entry points of the group `aserve.attention` (attention/registry.py). The option `--device auto`
does not choose it, so that installing a package changes no running setup.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import TypeAlias

from aserve.errors import ConfigError
from aserve.gpu.device.base import Device
from aserve.gpu.device.cpu.device import CpuDevice
from aserve.gpu.device.cuda.device import open_cuda

AUTO = "auto"
GROUP = "aserve.devices"  # of entry points

# Opens a device. The argument is the reason for the choice, which becomes part of `Device.about`.
# It raises ConfigError where the machine has no such device.
OpenDevice: TypeAlias = Callable[[str], Device]

# `auto` takes the first that can be opened.
DEVICES: Mapping[str, OpenDevice] = {"cuda": open_cuda, "cpu": CpuDevice}


def devices_of(local_rank: int, num_ranks: int) -> Mapping[str, OpenDevice]:
    """Returns the devices as one of several ranks on this machine opens them."""
    own = functools.partial(open_cuda, local_rank=local_rank, num_ranks=num_ranks)
    return {**DEVICES, "cuda": own}


# Devices with an executor of their own (aserve/load.py), which no row here opens.
OTHER_EXECUTORS = ("mlx",)


def open_device(name: str, devices: Mapping[str, OpenDevice] = DEVICES) -> Device:
    if name == AUTO:
        return _open_first(devices)
    open_named = devices.get(name) or _installed(name)
    if open_named is None:
        known = ", ".join([AUTO, *device_names(devices)])
        raise ConfigError(f"device {name!r} is not supported; supported: {known}", param="device")
    try:
        return open_named("")
    except ConfigError as error:
        raise ConfigError(f"{error.message}; take --device cpu or auto", param="device") from None


def device_names(devices: Mapping[str, OpenDevice] = DEVICES) -> list[str]:
    """Returns the names of the devices, those of installed packages included."""
    return sorted({*devices, *OTHER_EXECUTORS, *entry_points(group=GROUP).names})


def _installed(name: str) -> OpenDevice | None:
    """Returns the device of another package, or None."""
    point = next(iter(entry_points(group=GROUP, name=name)), None)
    found: OpenDevice | None = None if point is None else point.load()
    return found


def _open_first(devices: Mapping[str, OpenDevice]) -> Device:
    missing: list[str] = []
    for open_next in devices.values():
        try:
            return open_next("; ".join(["auto", *missing]))
        except ConfigError as error:
            missing.append(error.message)
    raise ConfigError(f"no device can be used: {'; '.join(missing)}", param="device")
