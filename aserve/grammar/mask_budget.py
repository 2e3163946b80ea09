"""How much processor time the masks of one request, and of one client, may take.

Each mask may take ALLOWANCE_S. What it takes beyond that is its excess, and excess is limited: for
a request in all, for a client within a window. A matcher of an ordinary grammar takes 10 us to 1 ms
per mask and has no excess at all; an ambiguous grammar's matcher slows down with each token.

Pure but for the clock that it is given. Written by the mask actor alone, on the loop's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from aserve.errors import ClientError, InvalidRequest, QueueFull

ALLOWANCE_S = 0.002
SLOW_S = 0.05  # a request whose excess is larger goes on in the slow lane
WINDOW_S = 60.0
MAX_CLIENTS = 4096  # accounts that are kept; one without excess can be forgotten


@dataclass(frozen=True, slots=True)
class MaskLimits:
    """Excess in seconds of processor time."""

    request_s: float = 2.0
    client_s: float = 10.0  # in WINDOW_S


class RequestEffort:
    """What the masks of one request took so far, all children together."""

    __slots__ = ("client", "excess_s", "num_masks", "param", "seconds")

    def __init__(self, *, client: str, param: str, is_slow: bool = False) -> None:
        """`is_slow`: its grammar was slow already when it was tried out."""
        self.client = client
        self.param = param
        self.num_masks = 0
        self.seconds = 0.0
        self.excess_s = SLOW_S if is_slow else 0.0

    @property
    def is_slow(self) -> bool:
        return self.excess_s >= SLOW_S


class MaskBudget:
    def __init__(self, limits: MaskLimits, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._clients: dict[str, tuple[float, float]] = {}  # excess, and when it was that

    def charge(self, effort: RequestEffort, seconds: float) -> None:
        """Raises the error that the request ends with when it is over its own limit."""
        excess_s = max(0.0, seconds - ALLOWANCE_S)
        effort.num_masks += 1
        effort.seconds += seconds
        effort.excess_s += excess_s
        if excess_s:
            self.charge_client(effort.client, excess_s)
        if self.is_over(effort):
            raise self._too_complex(effort)

    def is_over(self, effort: RequestEffort, running_s: float = 0.0) -> bool:
        """`running_s` is what a mask that is not ready yet has taken so far."""
        excess_s = effort.excess_s + max(0.0, running_s - ALLOWANCE_S)
        return excess_s > self._limits.request_s

    def check_client(self, effort: RequestEffort) -> None:
        """Before a mask of a slow request: raises when its client is over the limit. Requests that
        are not slow go on, because they cost next to nothing.
        """
        excess_s = self._client_excess(effort.client)
        if not effort.is_slow or excess_s <= self._limits.client_s:
            return
        wait_s = (excess_s - self._limits.client_s) * WINDOW_S / self._limits.client_s
        raise QueueFull(
            f"The grammars of this client took {excess_s:.1f} seconds of processor time within "
            f"{WINDOW_S:g} seconds, more than {self._limits.client_s:g}. Make them less ambiguous, "
            "try again later, or start the server with a larger --grammar-client-mask-time.",
            param=effort.param,
            code="grammar_time_exhausted",
            retry_after_s=max(1.0, round(wait_s)),
        )

    def charge_client(self, client: str, excess_s: float) -> None:
        if len(self._clients) >= MAX_CLIENTS and client not in self._clients:
            self._forget_clients()
        self._clients[client] = (self._client_excess(client) + excess_s, self._clock())

    def _too_complex(self, effort: RequestEffort) -> ClientError:
        spent = f"{effort.seconds:.1f} seconds of processor time for {effort.num_masks} tokens"
        excess = f"{effort.excess_s:.1f} seconds more than {ALLOWANCE_S * 1000:g} ms each"
        return InvalidRequest(
            f"Invalid '{effort.param}': finding out which tokens may come next took {spent}, "
            f"{excess}, and the limit is {self._limits.request_s:g} s. Make the grammar less "
            "ambiguous, ask for fewer tokens or choices, or start the server with a larger "
            "--grammar-mask-time.",
            param=effort.param,
            code="grammar_too_complex",
        )

    def _client_excess(self, client: str) -> float:
        """It runs off at the rate at which the limit comes back."""
        excess_s, at_s = self._clients.get(client, (0.0, 0.0))
        rate = self._limits.client_s / WINDOW_S
        return max(0.0, excess_s - (self._clock() - at_s) * rate)

    def _forget_clients(self) -> None:
        """Those without excess; if none is, the one with the least."""
        owing = {name: entry for name, entry in self._clients.items() if self._client_excess(name)}
        if len(owing) >= MAX_CLIENTS:
            del owing[min(owing, key=self._client_excess)]
        self._clients = owing
