"""What the server and a compile worker say to each other.

Must not know processes, threads or xgrammar. One Setup, answered by Ready; then one Reply per Job.
"""

from __future__ import annotations

import msgspec

from aserve.messages.requests import Grammar

# What is said of a process that was killed while it compiled: the kernel does that.
KILLED = (
    "compiling it was ended by the system, which does that when memory runs out. Make it simpler, "
    "or give the server more memory"
)


class Vocabulary(msgspec.Struct, frozen=True):
    """What grammars know of a model: the bytes of each token id, nothing for one without text.

    `vocab_size` is the model's, which may be padded beyond its tokens; `end_ids` end an answer.
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
    """It compiles within the limits, and some tokens could be matched. `is_slow`: that took long.

    WHY: the server compiles it again instead of reading what the worker made: xgrammar's JSON of a
    compiled grammar grows with the square of its rules (500 properties: 129 MB and 10 s, while
    compiling them takes 2 MB and 0.1 s).
    """

    is_slow: bool


class Failed(msgspec.Struct, frozen=True, tag=True):
    """`code` is that of the error for the client, and `message` goes on after the field's name."""

    code: str
    message: str


class Reply(msgspec.Struct, frozen=True):
    result: Done | Failed
