"""A server process with the bundled model: ready, used, stopped, killed, refused."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import urllib.error
from pathlib import Path

import pytest

from tests.e2e.server_process import REPOSITORY, ServerProcess, command, environment

LONG = {"model": "aserve-tiny", "prompt": "Once", "max_tokens": 900, "ignore_eos": True}

# The executor's thread ends in its 40th step, as if the device had gone.
KILLED = """
import sys
from aserve.gpu import runner
from aserve.cli import main
step, count = runner.ModelRunner.step, iter(range(40))
def fatal(self, *args, **kwargs):
    if next(count, None) is None:
        raise SystemExit("the device is gone")
    return step(self, *args, **kwargs)
runner.ModelRunner.step = fatal
sys.exit(main(["serve", "--port", "0"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["1", "2"])
def test_the_bundled_model_is_served_and_sigterm_ends_its_stream_with_an_error_event(
    processes: str,
) -> None:
    with ServerProcess("--drain-timeout", "0.2", "--processes", processes) as server:
        assert json.loads(server.get("/health")) == {"status": "ready"}
        models = json.loads(server.get("/v1/models"))["data"]
        assert [model["id"] for model in models] == ["aserve-tiny"]
        with server.post("/v1/completions", LONG | {"stream": True}) as answer:
            assert answer.readline().startswith(b"data: ")
            code, took_s = server.end(signal.SIGTERM)
            events = [line for line in answer.read().splitlines() if line]
        assert code == 0
        assert took_s < 5
        assert events[-1] == b"data: [DONE]"
        last = json.loads(events[-2].removeprefix(b"data: "))
        assert last["error"]["code"] == "server_draining"
    assert "Traceback" not in server.text


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["1", "2"])
def test_ctrl_c_ends_an_idle_server_with_0(processes: str) -> None:
    """A terminal sends it to every process."""
    with ServerProcess("--processes", processes) as server:
        if server.engine_pid != server.process.pid:
            os.kill(server.engine_pid, signal.SIGINT)
        code, took_s = server.end(signal.SIGINT)
    assert code == 0
    assert took_s < 5
    assert "Traceback" not in server.text


@pytest.mark.slow
def test_a_killed_executor_ends_the_stream_with_an_error_and_the_process_with_1() -> None:
    with ServerProcess(arguments=[sys.executable, "-c", KILLED]) as server:
        with server.post("/v1/completions", LONG | {"stream": True}) as answer:
            events = [line for line in answer.read().splitlines() if line]
        assert json.loads(events[-2].removeprefix(b"data: "))["error"]["code"] == "engine_dead"
        code, _ = server.end(None)
    assert code == 1


@pytest.mark.slow
def test_a_killed_engine_ends_the_stream_with_an_error_and_the_server_with_1() -> None:
    with ServerProcess("--processes", "2") as server:
        with server.post("/v1/completions", LONG | {"stream": True}) as answer:
            assert answer.readline().startswith(b"data: ")
            os.kill(server.engine_pid, signal.SIGKILL)
            events = [line for line in answer.read().splitlines() if line]
        assert json.loads(events[-2].removeprefix(b"data: "))["error"]["code"] == "engine_dead"
        code, _ = server.end(None)
    assert code == 1
    assert "was ended by SIGKILL" in server.text


@pytest.mark.slow
def test_a_killed_server_leaves_no_engine() -> None:
    with ServerProcess("--processes", "2") as server:
        engine = os.pidfd_open(server.engine_pid)
        with server.post("/v1/completions", LONG | {"stream": True}) as answer:
            assert answer.readline().startswith(b"data: ")
            server.process.kill()
            ended, _, _ = select.select([engine], [], [], 10)
        os.close(engine)
    assert ended, "its end makes the descriptor readable"
    assert "Traceback" not in server.text


@pytest.mark.slow
def test_an_engines_process_keeps_outputs_to_a_grammar_and_says_what_is_wrong_with_one() -> None:
    body = LONG | {"ignore_eos": False}
    with ServerProcess("--processes", "2", "--debug-checks") as server:
        good = body | {"structured_outputs": {"choice": ["one two"]}}
        with server.post("/v1/completions", good) as answer:
            assert json.loads(answer.read())["choices"][0]["text"] == "one two"
        with pytest.raises(urllib.error.HTTPError) as refused:
            server.post("/v1/completions", body | {"structured_outputs": {"regex": "("}})
        with refused.value as answer:
            assert answer.code == 400
            assert json.loads(answer.read())["error"]["code"] == "invalid_grammar"
        metrics = server.get("/metrics").decode()
        assert 'aserve_grammar_compiles_total{outcome="ok"} 1.0' in metrics
        assert 'aserve_grammar_compiles_total{outcome="invalid_grammar"} 1.0' in metrics


@pytest.mark.slow
def test_a_recording_of_the_engines_process_replays(tmp_path: Path) -> None:
    recording = tmp_path / "recording"
    relative = os.path.relpath(recording, REPOSITORY)
    with ServerProcess("--processes", "2", "--record", relative) as server:
        with server.post("/v1/completions", LONG | {"max_tokens": 30}) as answer:
            assert json.loads(answer.read())["usage"]["completion_tokens"] == 30
        server.end(signal.SIGTERM)
    lines = run("replay", str(recording)).stdout.splitlines()
    assert lines[-1].startswith("replayed turns=")
    assert lines[-1].endswith("idle=True")


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_model_that_cannot_be_run_is_one_line_and_exit_code_2(
    processes: str, tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"vocab_size": 300}')
    options = ("--port", "0", "--log-level", "error", "--load-format", "dummy")
    result = run("serve", str(tmp_path), *options, "--processes", processes)
    assert result.returncode == 2, result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith("aserve: error: ")
    assert str(config) in line


@pytest.mark.slow
def test_a_busy_port_is_one_line_and_exit_code_2() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = run("serve", "--port", port, "--log-level", "error")
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"aserve: error: cannot listen on 127.0.0.1:{port}: ")


@pytest.mark.slow
def test_generate_writes_the_answer_alone_to_stdout() -> None:
    result = run("generate", "Once upon a time", "--max-tokens", "12")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
    assert result.stderr == ""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
