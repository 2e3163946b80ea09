"""Limits the processor time that the masks of one request, and of one client, take.

The time of a mask beyond ALLOWANCE_S is its excess. A request has a limit for its total excess, and
a client for its excess within WINDOW_S. The matcher of an ordinary grammar takes 10 us to 1 ms per
mask and has no excess; that of an ambiguous grammar slows down with each token.

The mask actor alone writes the accounts, on the loop's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from aserve.errors import ClientError, InvalidRequest, QueueFull

ALLOWANCE_S = 0.002
SLOW_S = 0.05  # a request with more excess continues in the queue of slow requests
WINDOW_S = 60.0
MAX_CLIENTS = 4096  # accounts that are kept; one without excess can be forgotten


@dataclass(frozen=True, slots=True)
class MaskLimits:
    """Excess in seconds of processor time."""

    request_s: float = 2.0
    client_s: float = 10.0  # in WINDOW_S


class RequestEffort:
    """The time that the masks of all children of one request have taken so far."""

    __slots__ = ("client", "excess_s", "num_masks", "param", "seconds")

    def __init__(self, *, client: str, param: str, is_slow: bool = False) -> None:
        """`is_slow`: the grammar's masks were slow already when the worker tried it out."""
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
        """Adds the time of one mask. Raises InvalidRequest when the request is over its limit."""
        excess_s = max(0.0, seconds - ALLOWANCE_S)
        effort.num_masks += 1
        effort.seconds += seconds
        effort.excess_s += excess_s
        if excess_s:
            self.charge_client(effort.client, excess_s)
        if self.is_over(effort):
            raise self._too_complex(effort)

    def is_over(self, effort: RequestEffort, running_s: float = 0.0) -> bool:
        """Returns whether the request is over its limit. `running_s` is the time of an unfinished
        mask.
        """
        excess_s = effort.excess_s + max(0.0, running_s - ALLOWANCE_S)
        return excess_s > self._limits.request_s

    def check_client(self, effort: RequestEffort) -> None:
        """Raises QueueFull if the request is slow and its client is over the limit. Other requests
        of the client continue, because their masks cost little.
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
        """Returns the client's excess, which decays to zero at the rate of one limit per window."""
        excess_s, at_s = self._clients.get(client, (0.0, 0.0))
        rate = self._limits.client_s / WINDOW_S
        return max(0.0, excess_s - (self._clock() - at_s) * rate)

    def _forget_clients(self) -> None:
        """Drops the clients without excess; if there is none, the one with the least."""
        owing = {name: entry for name, entry in self._clients.items() if self._client_excess(name)}
        if len(owing) >= MAX_CLIENTS:
            del owing[min(owing, key=self._client_excess)]
        self._clients = owing
