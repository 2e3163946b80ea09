"""The caller of a request and its rights. auth.py builds it, and it is never changed."""

from __future__ import annotations

from dataclasses import dataclass

from aserve.errors import InvalidRequest
from aserve.http.openai.limits import MAX_SEQUENCES


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and what it may ask for. The defaults are those of a program that embeds the
    engine. Requests share cached prefixes only within a `namespace`. Responses are stored for their
    `owner` alone; where the server has no keys, everybody is the same owner.
    """

    client: str = ""
    namespace: str = ""
    owner: str = ""
    may_set_priority: bool = True
    max_sequences: int = MAX_SEQUENCES  # of one call: prompts times n

    def check_priority(self, priority: int | None) -> None:
        if priority and not self.may_set_priority:
            raise InvalidRequest(
                f"Invalid 'priority': it is {priority}, and this server takes only 0 from you. "
                "It serves clients by fair shares, unless it is started with "
                "--enable-priority-scheduling, or the request has the admin API key.",
                param="priority",
                code="priority_not_allowed",
            )

    def check_sequences(self, num_prompts: int, n: int) -> None:
        """WHY: one request of more sequences than rows would make all others wait for it."""
        num_sequences = num_prompts * n
        if num_sequences > self.max_sequences:
            raise InvalidRequest(
                f"This request asks for {num_sequences} sequences ({num_prompts} prompts x {n} "
                f"answers each), but a request may have at most {self.max_sequences}. Send several "
                "requests, or start the server with a larger --max-sequences-per-request.",
                param="n" if num_prompts <= self.max_sequences else "prompt",
                code="too_many_sequences",
            )

    def namespace_of(self, cache_salt: str | None) -> str:
        """NOTE: a client's namespace has a fixed length and no slash, so that no salt leads into
        another client's.
        """
        salt = cache_salt or ""
        return f"{self.namespace}/{salt}" if self.namespace else salt


EMBEDDED = Caller()
