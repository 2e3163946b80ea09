"""The bound on prompts that wait for a thread of the tokenizer actor, or are in one.

Must not know requests: the actor says how many there are, and how long.
"""

from __future__ import annotations

from dataclasses import dataclass

from aserve.errors import QueueFull

RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class TokenizeQueue:
    max_requests: int = 512
    max_chars: int = 64 << 20  # characters and token ids of all their prompts

    def check(self, size: int, *, num_waiting: int, num_chars: int) -> None:
        """A text is taken alone whatever its size: how long it may be is for others to say."""
        if num_waiting >= self.max_requests:
            raise QueueFull(
                f"{num_waiting} prompts wait to be tokenized, and at most {self.max_requests} may. "
                "Try again later.",
                retry_after_s=RETRY_AFTER_S,
            )
        if num_waiting and num_chars + size > self.max_chars:
            raise QueueFull(
                f"Prompts of {num_chars} characters wait to be tokenized, this one has {size}, and "
                f"at most {self.max_chars} may wait. Try again later.",
                retry_after_s=RETRY_AFTER_S,
            )
