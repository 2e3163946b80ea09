"""The kinds of device by name. A new one is a file in this folder and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aserve.errors import ConfigError
from aserve.gpu.device.base import Device
from aserve.gpu.device.cpu import CpuDevice

DEVICES: Mapping[str, Callable[[], Device]] = {"cpu": CpuDevice}


def open_device(name: str) -> Device:
    build = DEVICES.get(name)
    if build is None:
        known = ", ".join(sorted(DEVICES))
        raise ConfigError(f"device {name!r} is not supported; supported: {known}", param="device")
    return build()
