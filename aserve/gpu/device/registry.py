"""The devices by name. A new device is a folder beside this file and a row in `DEVICES`.

A row opens a device; the device itself makes its operators and its fused step (`Device.ops`) and
chooses the format of the weights (`Device.weight_format`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from aserve.errors import ConfigError
from aserve.gpu.device.base import Device
from aserve.gpu.device.cpu.device import CpuDevice
from aserve.gpu.device.cuda.device import open_cuda

AUTO = "auto"

# Opens a device. The argument is the reason for the choice, which becomes part of `Device.about`.
# It raises ConfigError where the machine has no such device.
OpenDevice: TypeAlias = Callable[[str], Device]

# `auto` takes the first that can be opened.
DEVICES: Mapping[str, OpenDevice] = {"cuda": open_cuda, "cpu": CpuDevice}


def open_device(name: str, devices: Mapping[str, OpenDevice] = DEVICES) -> Device:
    if name == AUTO:
        return _open_first(devices)
    open_named = devices.get(name)
    if open_named is None:
        known = ", ".join([AUTO, *sorted(devices)])
        raise ConfigError(f"device {name!r} is not supported; supported: {known}", param="device")
    try:
        return open_named("")
    except ConfigError as error:
        raise ConfigError(f"{error.message}; take --device cpu or auto", param="device") from None


def _open_first(devices: Mapping[str, OpenDevice]) -> Device:
    missing: list[str] = []
    for open_next in devices.values():
        try:
            return open_next("; ".join(["auto", *missing]))
        except ConfigError as error:
            missing.append(error.message)
    raise ConfigError(f"no device can be used: {'; '.join(missing)}", param="device")
