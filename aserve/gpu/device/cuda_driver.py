"""Whether the engine is going to run on a CUDA device, asked of the driver: torch takes a second to
import, and a process that only asks would keep it.

It opens no device.
"""

from __future__ import annotations

import ctypes

LIBRARY = "libcuda.so.1"


def may_have_cuda(device: str) -> bool:
    """`device` is what the option says. NOTE: torch may find that it cannot use what is there."""
    return device == "cuda" or (device == "auto" and num_devices(LIBRARY) > 0)


def num_devices(library: str) -> int:
    """0 where there is no driver."""
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        return 0
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value
