"""The options of `make gpu-check`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from aserve.option import Limits, option
from tools.gpu_check.wheels import OUT


@dataclass(frozen=True, slots=True)
class GpuCheckOptions:
    out: str = option(OUT, "directory of the results; what is there is kept", Limits(metavar="DIR"))
    parts: str | None = option(
        None, "those that are run; default: all", Limits(metavar="PART,PART,...")
    )
    again: str | None = option(
        None,
        "those that are run although they are there; failed: all that are not done; all",
        Limits(metavar="PART,PART,..."),
    )
    wheels: str | None = option(
        None, "packages that are missing here, as wheels", Limits(metavar="DIR")
    )
    time_limit: float = option(
        math.inf, "seconds for this call: what may take longer waits for the next", Limits(low=1)
    )
    device: str = option(
        "cuda", "cpu: a dry run of what it can run", Limits(choices=("cuda", "cpu"))
    )
    shape: str = option(
        "full", "tiny: small models and loads, for a dry run", Limits(choices=("full", "tiny"))
    )
