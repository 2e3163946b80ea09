"""The options of the benches, one record each; the command line makes flags of their fields.

Must not import what a bench needs: `aserve bench --help` reads only this.
"""

from __future__ import annotations

from dataclasses import dataclass

from aserve.config import Limits, option
from aserve.errors import ConfigError

LIST = Limits(metavar="N,N,...")


@dataclass(frozen=True, slots=True)
class HostStepOptions:
    rows: str = option("16,64,256,1024", "running requests, one measurement each", LIST)
    steps: int = option(100, "measured steps of a repeat", Limits(low=1))
    repeats: int = option(3, "repeats; their medians and spread are shown", Limits(low=1))


def integers(text: str, *, flag: str) -> tuple[int, ...]:
    """The numbers of a list such as `1,8,32`."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise ConfigError(f"{flag} {text}: must be integers from 1 with commas between them")
    return numbers
