"""The number of sequences that an engine admits. The frontend refuses calls beyond it at once."""

from __future__ import annotations

from dataclasses import dataclass

from aserve.errors import InvalidRequest, QueueFull


@dataclass(frozen=True, slots=True)
class Capacity:
    """The numbers of sequences that may run and wait.

    WHY: the engine itself refuses requests beyond its queue, fairly among clients. An engine that
    has stopped answering refuses nothing, so the frontend has a slightly higher limit of its own.
    """

    max_rows: int
    max_waiting: int

    def check(self, num_sequences: int, *, num_open: int) -> None:
        """Raises InvalidRequest for a call that can never be admitted, else QueueFull."""
        most = self.max_rows + self.max_waiting
        if num_sequences > most:
            raise InvalidRequest(
                f"This call makes {num_sequences} sequences (prompts times n), but the server runs "
                f"at most {self.max_rows} at once and lets {self.max_waiting} wait, so it could "
                "never be admitted. Send fewer prompts in a call, or a smaller n.",
                param="n",
                code="too_many_sequences",
            )
        if num_open + num_sequences > most + self.max_waiting // 4:
            raise QueueFull(
                f"The server holds {num_open} sequences, of which at most {self.max_rows} run at "
                f"once, and this call adds {num_sequences}. Try again later.",
                retry_after_s=1.0,
            )
