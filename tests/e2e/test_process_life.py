"""What happens around a server process: closed streams, full disks, hang-ups, and work that is left
when it ends.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
from pathlib import Path

import pytest

from tests.e2e.server_process import REPOSITORY, START_S, ServerProcess, command, environment

LONG = {"model": "aserve-tiny", "prompt": "Once", "max_tokens": 900, "ignore_eos": True}

# A prompt that asks for it keeps its thread of the tokenizer for ever.
STUCK = """
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


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
    return port


def until_ready(server: ServerProcess) -> None:
    """Asks a server whose output nobody can read."""
    pause = threading.Event()
    for _ in range(int(START_S / 0.1)):
        try:
            if json.loads(server.get("/health"))["status"] == "ready":
                return
        except (urllib.error.URLError, ConnectionError):
            assert server.process.poll() is None, "the server ended while it started"
        pause.wait(0.1)
    raise AssertionError("the server did not become ready")


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_server_whose_standard_streams_are_closed_serves_and_ends_with_0(processes: str) -> None:
    port = free_port()
    serve = command("serve", "--port", str(port), "--processes", processes)
    arguments = ["/bin/sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *serve]
    with ServerProcess(arguments=arguments, waits=False) as server:
        server.address = f"http://127.0.0.1:{port}"
        until_ready(server)
        with server.post("/v1/completions", LONG | {"max_tokens": 3}) as answer:
            assert json.loads(answer.read())["usage"]["completion_tokens"] == 3
        code, _ = server.end(signal.SIGTERM)
    assert code == 0, server.text
    assert "Traceback" not in server.text


@pytest.mark.slow
def test_a_hang_up_drains_the_server_like_sigterm() -> None:
    """A terminal that is closed sends it to every process."""
    with ServerProcess("--drain-timeout", "0.2", "--processes", "2") as server:
        with server.post("/v1/completions", LONG | {"stream": True}) as answer:
            assert answer.readline().startswith(b"data: ")
            os.kill(server.engine_pid, signal.SIGHUP)
            server.process.send_signal(signal.SIGHUP)
            events = [line for line in answer.read().splitlines() if line]
        assert json.loads(events[-2].removeprefix(b"data: "))["error"]["code"] == "server_draining"
        code, _ = server.end(None)
    assert code == 0, server.text


@pytest.mark.slow
def test_a_prompt_that_is_still_being_prepared_does_not_keep_the_process() -> None:
    """Its client has gone. Without an end of its own the process would wait for ever."""
    serve = [sys.executable, "-c", STUCK, "serve", "--port", "0", "--drain-timeout", "0.1"]
    with ServerProcess(arguments=serve) as server:
        address = server.address.removeprefix("http://").split(":")
        body = json.dumps(LONG | {"prompt": "Once " * 500, "max_tokens": 77}).encode()
        with socket.create_connection((address[0], int(address[1]))) as client:
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
                % (len(body), body)
            )
            server.read_until("is being prepared")
        code, _ = server.end(signal.SIGTERM)
    assert code == 0, server.text


@pytest.mark.slow
def test_a_recording_that_fills_the_disk_ends_with_a_warning_and_the_server_goes_on(
    tmp_path: Path,
) -> None:
    """A limit of the size of a file plays the disk."""
    path = tmp_path / "recording"
    serve = command("serve", "--port", "0", "--record", str(path))
    limited = ["/bin/sh", "-c", 'ulimit -f 16; trap "" XFSZ; exec "$@"', "sh", *serve]
    with ServerProcess(arguments=limited) as server:
        for _ in range(2):
            with server.post("/v1/completions", LONG) as answer:
                assert json.loads(answer.read())["usage"]["completion_tokens"] == 900
        code, _ = server.end(signal.SIGTERM)
    assert code == 0, server.text
    assert server.text.count(f"recording to {path} stopped: ") == 1
    assert "Traceback" not in server.text


@pytest.mark.slow
def test_a_recording_to_a_full_disk_is_one_line_and_exit_code_2() -> None:
    options = ("--port", "0", "--log-level", "error", "--record", "/dev/full")
    result = run("serve", *options, "--processes", "2")
    assert result.returncode == 2, result.stderr
    (line,) = result.stderr.splitlines()
    assert line == "aserve: error: cannot record to /dev/full: No space left on device"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=START_S,
    )
