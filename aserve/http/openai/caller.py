"""The caller of a request and its rights. auth.py builds it, and it is never changed."""

from __future__ import annotations

from dataclasses import dataclass

from aserve.errors import InvalidRequest
from aserve.http.openai.limits import MAX_SEQUENCES


@dataclass(frozen=True, slots=True)
class Caller:
    """The client behind a request, and its rights. The defaults are for a program that embeds the
    engine. Requests share cached prefixes only within a `namespace`. A stored response is visible
    only to its `owner`; on a server without API keys all clients are one owner.
    """

    client: str = ""
    namespace: str = ""
    owner: str = ""
    may_set_priority: bool = True
    max_sequences: int = MAX_SEQUENCES  # of one call: prompts times n

    def check_priority(self, priority: int | None) -> None:
        if priority and not self.may_set_priority:
            raise InvalidRequest(
                f"Invalid 'priority': got {priority}, but only 0 is allowed. The server shares its "
                "engine fairly between clients unless it is started with "
                "--enable-priority-scheduling or the request has the admin API key.",
                param="priority",
                code="priority_not_allowed",
            )

    def check_sequences(self, num_prompts: int, n: int) -> None:
        """Raises above the limit. WHY: one request with more sequences than the engine has rows
        would make all other clients wait.
        """
        num_sequences = num_prompts * n
        if num_sequences > self.max_sequences:
            raise InvalidRequest(
                f"This request asks for {num_sequences} sequences ({num_prompts} prompts x {n} "
                f"choices each), but at most {self.max_sequences} are allowed. Send several "
                "requests, or start the server with a larger --max-sequences-per-request.",
                param="n" if num_prompts <= self.max_sequences else "prompt",
                code="too_many_sequences",
            )

    def namespace_of(self, cache_salt: str | None) -> str:
        """Returns the prefix-cache namespace for a salt. NOTE: a client's namespace has a fixed
        length and no slash, so no salt can lead into another client's namespace.
        """
        salt = cache_salt or ""
        return f"{self.namespace}/{salt}" if self.namespace else salt


EMBEDDED = Caller()
