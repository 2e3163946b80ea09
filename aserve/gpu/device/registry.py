"""The kinds of device by name. A new one is a file in this folder and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aserve.errors import ConfigError
from aserve.gpu.device.base import Device
from aserve.gpu.device.cpu.device import CpuDevice
from aserve.gpu.device.cuda.device import open_cuda

AUTO = "auto"
# Gets why it was chosen; raises a ConfigError where there is none. The best come first.
DEVICES: Mapping[str, Callable[[str], Device]] = {"cuda": open_cuda, "cpu": CpuDevice}


def open_device(name: str) -> Device:
    if name == AUTO:
        return _best()
    build = DEVICES.get(name)
    if build is None:
        known = ", ".join([AUTO, *sorted(DEVICES)])
        raise ConfigError(f"device {name!r} is not supported; supported: {known}", param="device")
    try:
        return build("")
    except ConfigError as error:
        raise ConfigError(f"{error.message}; take --device cpu or auto", param="device") from None


def _best() -> Device:
    """The first that is there."""
    missing: list[str] = []
    for build in DEVICES.values():
        try:
            return build("; ".join(["auto", *missing]))
        except ConfigError as error:
            missing.append(error.message)
    raise ConfigError(f"no device can be used: {'; '.join(missing)}", param="device")
