"""The messages between the server and a compile worker.

One Setup comes first and is answered by Ready; then each Job is answered by one Reply.
"""

from __future__ import annotations

import msgspec

from aserve.messages.requests import Grammar

# The message for a worker that the kernel killed while it compiled.
KILLED = (
    "compiling it was ended by the system, which does that when memory runs out. Make it simpler, "
    "or give the server more memory"
)


class Vocabulary(msgspec.Struct, frozen=True):
    """The bytes of each token id, empty for a token without text.

    `vocab_size` is that of the logits, which may be padded; `end_ids` are the tokens that end an
    answer.
    """

    tokens: tuple[bytes, ...]
    vocab_size: int
    end_ids: tuple[int, ...]


class Setup(msgspec.Struct, frozen=True):
    vocabulary: Vocabulary
    timeout_s: float  # for one grammar
    memory_bytes: int  # for one grammar, beyond what the worker has when it is ready
    idle_s: float  # a worker that gets no job for so long ends


class Ready(msgspec.Struct, frozen=True):
    pass


class Job(msgspec.Struct, frozen=True):
    grammar: Grammar


class Done(msgspec.Struct, frozen=True, tag=True):
    """The grammar compiles within the limits and matches tokens; `is_slow` if its masks took long.

    WHY: the server compiles it again instead of reading what the worker made: xgrammar's JSON of a
    compiled grammar grows with the square of its rules (500 properties: 129 MB and 10 s, while
    compiling them takes 2 MB and 0.1 s).
    """

    is_slow: bool


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The error for the client. `message` continues a sentence that names the request's field."""

    code: str
    message: str


class Reply(msgspec.Struct, frozen=True):
    result: Done | Failed
