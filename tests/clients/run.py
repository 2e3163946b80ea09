"""Runs clients that nobody here wrote against a server with the bundled model: `make test-clients`.

Each client has an environment of its own, made once in .venv-clients, and a program beside this
file, which gets the server's address and the model's name and fails if something is wrong.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

from tests.e2e.server_process import ServerProcess

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parents[1] / ".venv-clients"
MODEL = "aserve-tiny"
TIMEOUT_S = 300.0
# The program of each client, with the packages that it needs.
CLIENTS: dict[str, tuple[str, ...]] = {
    "anthropic_sdk": ("anthropic",),
    "ollama_client": ("ollama",),
    "hugging_face_client": ("huggingface_hub",),
    "langchain_openai_client": ("langchain-openai",),
    "instructor_client": ("instructor",),
    "litellm_client": ("litellm", "mcp"),
    "pydantic_ai_client": ("pydantic-ai-slim[openai]",),
    "agents_sdk": ("openai-agents",),
}


def python_of(name: str) -> Path:
    """Returns the interpreter of a client's environment, which is made if it is not there."""
    home = ENVIRONMENTS / name
    python = home / "bin" / "python"
    ready = home / "ready"
    if not ready.exists():
        venv.create(home, clear=True, with_pip=True)
        install = [str(python), "-m", "pip", "install", "--quiet", *CLIENTS[name]]
        subprocess.run(install, check=True)
        ready.touch()
    return python


def main(names: list[str]) -> int:
    failed = []
    with ServerProcess("--grammar-workers", "1") as server:
        for name in names or list(CLIENTS):
            script = str(HERE / f"{name}.py")
            program = [str(python_of(name)), script, server.address, MODEL]
            is_good = subprocess.run(program, timeout=TIMEOUT_S).returncode == 0
            sys.stdout.write(f"{name}: {'passed' if is_good else 'FAILED'}\n")
            sys.stdout.flush()
            if not is_good:
                failed.append(name)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
