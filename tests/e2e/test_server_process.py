"""A server process with the bundled model: hung up, killed, recorded."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from tests.e2e.server_process import REPOSITORY, ServerProcess, run

pytestmark = pytest.mark.slow

LONG = {"model": "aserve-tiny", "prompt": "Once", "max_tokens": 900, "ignore_eos": True}

# A prompt that asks for it keeps its thread of the tokenizer for ever.
STUCK_PROMPT = """
import threading
from aserve import program
from aserve.text.prompt import PromptEncoder
prepare = PromptEncoder.prepare
def stuck(self, request):
    if request.sampling.max_tokens == 77:
        print("aserve: a prompt is being prepared", flush=True)
        threading.Event().wait()
    return prepare(self, request)
PromptEncoder.prepare = stuck
program.main()
"""


def code_at_the_end_of(events: bytes) -> str:
    """Of the error that a stream ends with."""
    *_, last, done = (line for line in events.splitlines() if line)
    assert done == b"data: [DONE]"
    code: str = json.loads(last.removeprefix(b"data: "))["error"]["code"]
    return code


def test_a_signal_of_the_terminal_drains_both_processes_and_the_recording_replays(
    tmp_path: Path,
) -> None:
    """Ctrl-C, or a terminal that is closed: every process gets it. test_attacks.py closes one."""
    recording = tmp_path / "recording"
    relative = os.path.relpath(recording, REPOSITORY)
    options = ("--drain-timeout", "0.2", "--processes", "2", "--record", relative)
    with ServerProcess(*options) as server:
        with server.post("/v1/completions", LONG | {"max_tokens": 30}) as answer:
            assert json.loads(answer.read())["usage"]["completion_tokens"] == 30
        for process in (server.process.pid, server.engine_pid):
            os.kill(process, signal.SIGUSR2)
        with server.post("/v1/completions", LONG | {"stream": True}) as answer:
            assert answer.readline().startswith(b"data: ")
            for number in (signal.SIGINT, signal.SIGHUP):
                os.kill(server.engine_pid, number)
            server.process.send_signal(signal.SIGINT)
            assert code_at_the_end_of(answer.read()) == "server_draining"
        code, took_s = server.end(None)
    assert code == 0, server.text
    assert took_s < 25, "it did not wait for more than the drain's limit"
    assert "Traceback" not in server.text
    assert server.text.count("Current thread") == 2
    lines = run("replay", str(recording)).stdout.splitlines()
    ticks = lines[-1].removeprefix("replayed ticks=").partition(" ")[0]
    assert int(ticks) > 30


def test_a_killed_engine_without_restarts_ends_the_stream_with_an_error_and_the_server_with_1() -> (
    None
):
    with ServerProcess("--processes", "2", "--max-engine-restarts", "0") as server:
        with server.post("/v1/completions", LONG | {"stream": True}) as answer:
            assert answer.readline().startswith(b"data: ")
            os.kill(server.engine_pid, signal.SIGKILL)
            assert code_at_the_end_of(answer.read()) == "engine_dead"
        code, _ = server.end(None)
    assert code == 1
    assert "was ended by SIGKILL" in server.text


def test_a_prompt_that_is_still_being_prepared_does_not_keep_the_process() -> None:
    """Its client has gone. Without an end of its own the process would wait for ever."""
    serve = [sys.executable, "-c", STUCK_PROMPT, "serve", "--port", "0", "--drain-timeout", "0.1"]
    with ServerProcess(arguments=serve) as server:
        host, _, port = server.address.removeprefix("http://").partition(":")
        body = json.dumps(LONG | {"prompt": "Once " * 500, "max_tokens": 77}).encode()
        with socket.create_connection((host, int(port))) as client:
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
                % (len(body), body)
            )
            server.read_until("is being prepared")
        code, _ = server.end(signal.SIGTERM)
    assert code == 0, server.text
