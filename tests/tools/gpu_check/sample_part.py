"""A part of gpu-check that ends in whatever way its argument says."""

from __future__ import annotations

import os
import signal
import threading

from tools.gpu_check.records import Figures
from tools.gpu_check.setting import Setting


def measure(setting: Setting, argument: str) -> Figures:
    setting.keep({"kept": 1})
    match argument:
        case "raises":
            raise ValueError("what went wrong")
        case "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hangs":
            threading.Event().wait()
        case "leaves":
            os._exit(0)
        case "cannot":
            return {"not_run": "no such device"}
    return {"value": 2.5, "said": argument}
