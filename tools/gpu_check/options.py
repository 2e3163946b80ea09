"""The options of `make gpu-check`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from aserve.options.option import Limits, option
from tools.gpu_check.wheels import OUT


@dataclass(frozen=True, slots=True)
class GpuCheckOptions:
    out: str = option(
        OUT, "directory of the results; finished parts in it are kept", Limits(metavar="DIR")
    )
    parts: str | None = option(
        None, "the parts to run; default: all", Limits(metavar="PART,PART,...")
    )
    again: str | None = option(
        None,
        "parts to run again; failed: all that are not done; all: every part",
        Limits(metavar="PART,PART,..."),
    )
    wheels: str | None = option(
        None, "wheels of packages that are not installed", Limits(metavar="DIR")
    )
    time_limit: float = option(
        math.inf,
        "seconds for this call; a part that may take longer is left for the next call",
        Limits(low=1),
    )
    device: str = option(
        "cuda", "cpu: a dry run of the parts that need no GPU", Limits(choices=("cuda", "cpu"))
    )
    shape: str = option(
        "full", "tiny: small models and loads, for a dry run", Limits(choices=("full", "tiny"))
    )
