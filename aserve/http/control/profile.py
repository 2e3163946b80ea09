"""The administrator's endpoints for profiles of the executor's thread: torch.profiler's traces, in
the directory of --profile-dir.
"""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryFile

import msgspec
from aiohttp import web

from aserve.errors import ConfigError, ErrorInfo
from aserve.http.body import read_body
from aserve.http.delivery import json_response
from aserve.http.errors import RequestFailed, refused
from aserve.http.openai.checks import unsupported
from aserve.http.route import Route
from aserve.http.state import HttpContext
from aserve.messages.changes import Profile

# SGLang's fields, and what to do instead.
ELSEWHERE = {
    "output_dir": "Traces are written to the directory of --profile-dir.",
    "num_steps": "A profile runs until /stop_profile.",
    "start_step": "A profile begins with the next step.",
}
FLAGS = ("with_stack", "record_shapes")
RUNNING = "profile_running"  # 409, as in vLLM


class ProfileBody(msgspec.Struct, kw_only=True):
    """SGLang's parameters of a profile, of which the last three are not supported."""

    with_stack: bool = False
    record_shapes: bool = False
    output_dir: str | None = None
    num_steps: int | None = None
    start_step: int | None = None


class ProfileAnswer(msgspec.Struct, omit_defaults=True):
    success: bool
    message: str
    path: str = ""


def set_up(_: web.Application, context: HttpContext) -> None:
    """Makes the directory, and sees whether files can be written there."""
    folder = context.options.profile_dir
    if folder is None:
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"--profile-dir {folder}: traces cannot be written there: {error.strerror}",
            param="profile_dir",
        ) from None


async def start(request: web.Request, context: HttpContext) -> web.Response:
    """Begins a profile. A client may send no body."""
    body = await read_body(request, ProfileBody) if request.can_read_body else ProfileBody()
    for name, advice in ELSEWHERE.items():
        if getattr(body, name) is not None:
            raise unsupported(name, advice)
    _directory_of(context)
    number = context.state.next_job()
    flags = tuple(name for name in FLAGS if getattr(body, name))
    await _run(context, Profile(number, flags=flags))
    return json_response(ProfileAnswer(True, "Start profiling."))


async def stop(_: web.Request, context: HttpContext) -> web.Response:
    """Ends the profile. Returns when its trace is written."""
    name = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    number = context.state.next_job()
    path = str(_directory_of(context) / f"aserve-{name}-{number}.trace.json.gz")
    await _run(context, Profile(number, path))
    return json_response(ProfileAnswer(True, "Stop profiling.", path))


async def _run(context: HttpContext, job: Profile) -> None:
    error: ErrorInfo | None = await context.loras.run_on_device(job)
    if error is not None:
        status = 409 if error.code == RUNNING else error.status
        raise RequestFailed(msgspec.structs.replace(error, status=status))


def _directory_of(context: HttpContext) -> Path:
    directory = context.options.profile_dir
    if directory is None:
        raise refused(400, "This server writes no profiles: start it with --profile-dir DIR.")
    return Path(directory).absolute()


ROUTES = (
    Route("POST", "/start_profile", start, ProfileBody, admin=True),
    Route("POST", "/stop_profile", stop, admin=True),
)
