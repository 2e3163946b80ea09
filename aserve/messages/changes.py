"""The messages by which a running engine and its requests are changed."""

from __future__ import annotations

from typing import TypeAlias

from aserve.errors import ErrorInfo
from aserve.messages.base import Message, Record


class Amend(Message, frozen=True):
    """http -> scheduler: changes the children of a request that wait or run. It follows the path of
    its request. Fields that are not set change nothing, and an Amend without any asks for the
    state. `stop` are further stop strings, for the detokenizer.

    The scheduler answers each Amend with an Amended. It may be sent twice: it sets values, and
    reasoning that has ended does not end again.
    """

    request_id: str
    number: int  # of the answer, unique in the frontend
    ends_reasoning: bool = False
    max_tokens: int | None = None
    priority: int | None = None
    stop: tuple[str, ...] = ()


class SequenceState(Record, frozen=True):
    """`phase` is that of the scheduler. `num_ahead` are the sequences that are admitted before this
    one, if it waits.
    """

    child: int
    phase: str
    prompt_len: int
    num_outputs: int
    max_tokens: int
    priority: int
    num_ahead: int | None = None


class Amended(Message, frozen=True):
    """The answer to an Amend, in order with the outputs of the request. `sequences` are the
    children that had not ended before; none if the request is not known (any more). With an error
    nothing was changed.
    """

    amend: Amend
    sequences: tuple[SequenceState, ...] = ()
    error: ErrorInfo | None = None


class ChangeSettings(Message, frozen=True):
    """http -> scheduler: these fields of the EngineSpec have new values from the next tick on. The
    logs have new levels: that of all processes, and that of requests in the frontends.
    """

    max_waiting: int
    max_batched_tokens: int
    max_mixed_prefill_tokens: int | None
    log_level: str
    log_requests: bool = False
    log_requests_level: int = 1


class LoadLora(Message, frozen=True):
    """http -> executor: puts the adapter in the directory `path` in a slot of the device. `lora_id`
    is never used again, and no request that still runs has the slot.
    """

    lora_id: int
    slot: int
    path: str


class LoadWeights(Message, frozen=True):
    """http -> executor: replaces the model's weights by those of the checkpoint in the directory
    `path`, or without one of the checkpoint that the engine began with. The safetensors files
    `tensors` replace tensors of it, and a later file those of an earlier one. No request runs
    meanwhile. `update_id` is never used again.
    """

    update_id: int
    path: str = ""
    tensors: tuple[str, ...] = ()


class Profile(Message, frozen=True):
    """http -> executor: begins to profile the executor's thread, or with a `path` ends that and
    writes the trace there. `profile_id` is never used again.
    """

    profile_id: int
    path: str = ""
    flags: tuple[str, ...] = ()  # arguments of torch.profiler that are true


class CheckWeights(Message, frozen=True):
    """http -> executor: takes a snapshot of the weights, or with `compares` answers an error unless
    they are those of the snapshot. `check_id` is never used again.
    """

    check_id: int
    compares: bool


class Sleep(Message, frozen=True):
    """http -> engine: ends the process of the engine, and keeps its open requests."""


class Wake(Message, frozen=True):
    """http -> engine: starts the process again, which goes on with the open requests."""


# What an engine does between two steps.
EngineJob: TypeAlias = LoadLora | LoadWeights | Profile | CheckWeights | Sleep | Wake
