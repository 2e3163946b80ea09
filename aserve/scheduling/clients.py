"""Counts the tokens that each client was served, which makes admission fair.

The scheduler keeps a virtual token counter per client, as in "Fairness in Serving Large Language
Models" (Sheng et al., OSDI 2024). A computed prompt token counts 1 and an output token counts 2,
because a decode step reads all weights for one token of a sequence, while a prompt shares that read
among its tokens. Prompt tokens that the prefix cache had, and tokens that are computed again after
a retraction, cost their client nothing.

A client without living sequences is idle. When it comes back, its counter is lifted to the least
counter of the active clients, so that nobody saves up service by being idle. A counter above that
is a debt, and it is kept. When all clients are idle, all counters start from 0 again.

The counters are written where a sequence is admitted, takes and leaves its row, and gets tokens.
"""

from __future__ import annotations

import heapq

from aserve.errors import ErrorInfo, QueueFull

PROMPT_WEIGHT = 1
OUTPUT_WEIGHT = 2
PLACES_PER_FREE_ONE = 8  # places in the queue that one client may hold for each that is free


class Client:
    """`served` is the weighted number of tokens that came back for this client. `pending` is the
    weighted number of prompt tokens that its running sequences still have to compute. Their sum
    orders admission: a client pays for a prompt when that is admitted, not when it is computed.
    """

    __slots__ = ("client_id", "num_living", "num_rows", "num_waiting", "pending", "served")

    def __init__(self, client_id: str) -> None:
        self.client_id = client_id
        self.served = 0
        self.pending = 0
        self.num_living = 0  # sequences that wait or run
        self.num_waiting = 0  # written by queue.py
        self.num_rows = 0

    @property
    def key(self) -> int:
        """The waiting sequences of the client with the least key are admitted first."""
        return self.served + self.pending

    def take_row(self, num_prompt_tokens: int) -> None:
        """Counts an admitted sequence, which has prompt tokens to pay for."""
        self.num_rows += 1
        self.pending += PROMPT_WEIGHT * num_prompt_tokens

    def give_back_row(self, num_prompt_tokens: int) -> None:
        """Counts a sequence that left its row before all of its prompt was computed."""
        self.num_rows -= 1
        self.pending -= PROMPT_WEIGHT * num_prompt_tokens

    def serve_prompt(self, num_tokens: int) -> None:
        self.pending -= PROMPT_WEIGHT * num_tokens
        self.served += PROMPT_WEIGHT * num_tokens

    def excuse_prompt(self, num_tokens: int) -> None:
        """Takes back prompt tokens that need not be computed after all."""
        self.pending -= PROMPT_WEIGHT * num_tokens

    def serve_outputs(self, num_tokens: int) -> None:
        self.served += OUTPUT_WEIGHT * num_tokens


class Clients:
    """The clients that are active, and the idle ones that are still in debt.

    NOTE: counters never fall while a client is known, so an entry of either heap is too low at
    worst, and is corrected when it comes to the top. Each operation costs O(log n) on average.
    """

    __slots__ = ("_active", "_by_id", "_idle", "num_active")

    def __init__(self) -> None:
        self.num_active = 0
        self._by_id: dict[str, Client] = {}
        self._active: list[tuple[int, str]] = []  # heap of (served, client_id)
        self._idle: list[tuple[int, str]] = []  # heap of (served, client_id)

    def __len__(self) -> int:
        return len(self._by_id)

    def find(self, client_id: str) -> Client:
        """Returns the client of this name, or a new one, which is known from its first `join`
        on.
        """
        return self._by_id.get(client_id) or Client(client_id)

    def join(self, client: Client, num_sequences: int) -> None:
        """Counts sequences of this client that begin to wait."""
        was_idle = not client.num_living
        if was_idle:
            client.served = max(client.served, self._least_served())
        client.num_living += num_sequences
        if was_idle:
            self._by_id[client.client_id] = client
            self.num_active += 1
            heapq.heappush(self._active, (client.served, client.client_id))
            self._forget_debts()

    def finish(self, client: Client) -> None:
        """Counts a sequence of this client that ended."""
        client.num_living -= 1
        if client.num_living:
            return
        self.num_active -= 1
        if not self.num_active:
            self._by_id.clear()
            self._active.clear()
            self._idle.clear()
        else:
            heapq.heappush(self._idle, (client.served, client.client_id))

    def _least_served(self) -> int:
        """Returns the least counter of the active clients; 0 if there is none."""
        while self._active:
            served, client_id = self._active[0]
            client = self._by_id.get(client_id)
            if client is None or not client.num_living:
                heapq.heappop(self._active)
            elif client.served != served:
                heapq.heapreplace(self._active, (client.served, client_id))
            else:
                return served
        return 0

    def _forget_debts(self) -> None:
        """Forgets idle clients whose counter would be lifted anyway, so that memory is bounded."""
        least = self._least_served()
        while self._idle and self._idle[0][0] <= least:
            _, client_id = heapq.heappop(self._idle)
            client = self._by_id.get(client_id)
            if client is not None and not client.num_living and client.served <= least:
                del self._by_id[client_id]


def place_refusal(
    client: Client, num_new: int, *, num_free: int, num_places: int
) -> ErrorInfo | None:
    """Says why a client may not have so many more sequences in the queue of `num_places`, though
    `num_free` would remain free; None if it may.

    A client may hold 8 times as many places as remain free (the dynamic threshold of Choudhury and
    Hahne, 1998): 8/9 of an otherwise empty queue. So a flood leaves places for others, and each
    further flood leaves some again. Nobody is refused the first request, and a program that embeds
    the engine, which names no client, has the whole queue.
    """
    num_held = client.num_waiting
    if not client.client_id or not num_held or num_held + num_new <= PLACES_PER_FREE_ONE * num_free:
        return None
    return QueueFull(
        f"Your other requests already hold {num_held} of the queue's {num_places} places, and it "
        "keeps some free for other clients. Try again later.",
        retry_after_s=1.0,
    ).info()
