"""The examples of README.md and docs/ run against a server with the bundled model."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys

import pytest

from aserve.cli import make_parser
from tests.architecture.source import ROOT
from tests.e2e.server_process import ServerProcess

pytestmark = pytest.mark.slow

EXAMPLE = re.compile(r"```python\n(.*?)```(?:\n```text\n(.*?)```)?", re.DOTALL)
ADDRESS = "http://127.0.0.1:8000"
SHELL = re.compile(r"```sh\n(.*?)```", re.DOTALL)
BORDER = "\x1e"  # printed after each example


@pytest.mark.parametrize(
    ("page", "num_examples"), [("README", 2), ("docs/api", 18), ("docs/models", 1)]
)
def test_every_example_of_a_page_prints_what_stands_under_it(
    server: ServerProcess, page: str, num_examples: int
) -> None:
    """All examples of a page run as one program: later ones use the names of earlier ones."""
    examples = EXAMPLE.findall((ROOT / f"{page}.md").read_text())
    assert len(examples) == num_examples
    program = "".join(f"{code}\nprint({BORDER!r}, end='')\n" for code, _ in examples)
    program = program.replace(ADDRESS, server.address).replace(
        ADDRESS.replace("http", "ws"), server.address.replace("http", "ws")
    )
    run = run_python("-c", program)
    assert run.returncode == 0, run.stderr
    printed = run.stdout.split(BORDER)
    for (code, expected), got in zip(examples, printed[:-1], strict=True):
        assert got.split() == expected.split(), code


def readme_commands() -> list[list[str]]:
    """The commands of the README's shell blocks, each as its words."""
    blocks = "".join(SHELL.findall((ROOT / "README.md").read_text()))
    return [shlex.split(command) for command in re.split(r"\n(?=aserve |curl )", blocks)]


def test_the_curl_command_of_the_readme_is_answered(server: ServerProcess) -> None:
    curl, *_ = readme_commands()
    assert curl[0] == "curl"
    path = curl[1].removeprefix(ADDRESS)
    body = json.loads(curl[curl.index("-d") + 1])
    with server.post(path, body) as response:
        answer = json.load(response)
    assert answer["choices"][0]["message"]["content"].endswith("27 plus 15 is 42.")


def test_the_command_lines_of_the_readme_are_accepted() -> None:
    _, generate, *others = readme_commands()
    names = [command[1] for command in others]
    assert names == ["chat", "serve", "serve"]
    for command in others:
        _, unknown = make_parser().parse_known_args(command[1:])
        assert unknown == []
    assert generate[:2] == ["aserve", "generate"]
    run = run_python("-m", *generate)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(" Mia lived in the park.")
    assert run.stderr == "", "the answer alone"


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
