"""The error tree. The party at fault decides the branch, and the branch decides the HTTP status.

An error can travel in a message as a value, `ErrorInfo`.

    AserveError
    ├── ClientError        4xx  the request cannot be served as it is
    │   ├── InvalidRequest        400
    │   ├── ContextTooLong        400  context_length_exceeded
    │   ├── NeverFits             400  needs more KV pages than the engine has
    │   ├── Unauthorized          401
    │   ├── NotFound              404
    │   ├── DeadlineExceeded      408  the request's own `timeout` ran out
    │   └── Cancelled             499  the client went away
    ├── CapacityError      429/503  would be fine later; carries Retry-After
    │   ├── QueueFull             429
    │   ├── QueueTimeout          429  the request's `max_queue_ms` ran out, or will
    │   ├── DeadlineUnreachable   429  the request's `deadline_ms` will run out
    │   └── ShuttingDown          503
    ├── EngineError        5xx  the engine failed while it worked on the request
    │   ├── StepError             500
    │   └── EngineDead            503
    │       └── MachineSilent     503  a machine of the engine says nothing any more
    ├── ConfigError        exit code 2: options, model files, ports
    └── BugError           500  ours: an invariant did not hold; carries the request's story
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

# What msgspec raises for bytes that it cannot decode: those of a text may be no UTF-8, and values
# may be nested too deeply.
UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class ExpectedWait(msgspec.Struct, frozen=True, gc=False):
    """The place of a request in the queue, from 1 on, and the wait that is expected there. The wait
    is None as long as too little was measured.
    """

    queue_position: int
    expected_wait_ms: int | None


class ErrorInfo(msgspec.Struct, frozen=True, gc=False):
    """An error as a value, in the fields that OpenAI's error body has, and with the wait that made
    the server refuse a request.
    """

    message: str
    type: str
    code: str
    status: int
    param: str | None = None
    retry_after_s: float | None = None
    wait: ExpectedWait | None = None


class AserveError(Exception):
    """Base of all; `message` says what happened, the value, the limit and what to do."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        wait: ExpectedWait | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.error_code = code or self.code
        self.retry_after_s = retry_after_s
        self.wait = wait

    def info(self) -> ErrorInfo:
        """NOTE: a message may quote a client, and a lone surrogate could not be sent to it."""
        return ErrorInfo(
            message=self.message.encode("utf-8", "backslashreplace").decode(),
            type=self.type,
            code=self.error_code,
            status=self.status,
            param=self.param,
            retry_after_s=self.retry_after_s,
            wait=self.wait,
        )


class ClientError(AserveError):
    status = 400
    type = "invalid_request_error"
    code = "invalid_request"


class InvalidRequest(ClientError):
    pass


class ContextTooLong(ClientError):
    code = "context_length_exceeded"


class NeverFits(ClientError):
    code = "exceeds_kv_capacity"


class Unauthorized(ClientError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class NotFound(ClientError):
    status = 404
    code = "not_found"


class DeadlineExceeded(ClientError):
    status = 408
    type = "timeout_error"
    code = "deadline_exceeded"


class Cancelled(ClientError):
    status = 499
    code = "request_cancelled"


class CapacityError(AserveError):
    status = 503
    type = "overloaded_error"
    code = "overloaded"


class QueueFull(CapacityError):
    status = 429
    type = "rate_limit_error"
    code = "queue_full"


class QueueTimeout(CapacityError):
    status = 429
    type = "rate_limit_error"
    code = "queue_timeout"


class DeadlineUnreachable(CapacityError):
    status = 429
    type = "rate_limit_error"
    code = "deadline_unreachable"


class ShuttingDown(CapacityError):
    code = "server_draining"


class EngineError(AserveError):
    code = "engine_error"


class StepError(EngineError):
    code = "step_failed"


class EngineDead(EngineError):
    status = 503
    code = "engine_dead"


class MachineSilent(EngineDead):
    """A machine of the engine says nothing any more, so that nobody starts it again."""

    code = "machine_silent"


class ConfigError(AserveError):
    """Options, model files or ports that cannot work: one line on stderr and exit code 2."""

    code = "config_error"


class BugError(AserveError):
    code = "bug"
