"""What the pages of docs/ show is what a server with the bundled model does."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.architecture.source import ROOT
from tests.e2e.server_process import ServerProcess

EXAMPLE = re.compile(r"```python\n(.*?)```(?:\n```text\n(.*?)```)?", re.DOTALL)
ADDRESS = "http://127.0.0.1:8000"
BORDER = "\x1e"  # printed after each example


@pytest.mark.slow
@pytest.mark.parametrize(("page", "num_examples"), [("api", 12), ("models", 1)])
def test_every_example_of_a_page_prints_what_stands_under_it(
    server: ServerProcess, page: str, num_examples: int
) -> None:
    """One program of all of them: later ones use the names of earlier ones."""
    examples = EXAMPLE.findall((ROOT / "docs" / f"{page}.md").read_text())
    assert len(examples) == num_examples
    program = "".join(f"{code}\nprint({BORDER!r}, end='')\n" for code, _ in examples)
    program = program.replace(ADDRESS, server.address).replace(
        ADDRESS.replace("http", "ws"), server.address.replace("http", "ws")
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    printed = run.stdout.split(BORDER)
    for (code, expected), got in zip(
        examples, printed, strict=False
    ):  # after the last border stands nothing
        assert got.split() == expected.split(), code
