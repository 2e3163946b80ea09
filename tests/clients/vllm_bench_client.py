"""`vllm bench serve`, by the program without torch that vLLM's package brings."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from aserve.tiny import MODEL_DIR

BACKENDS = ("vllm", "openai", "openai-chat", "openai-responses", "openai-embeddings")
NUM_PROMPTS = 20


def main(address: str, model: str) -> None:
    program = Path(sysconfig.get_path("purelib")) / "vllm" / "vllm-rs"
    program.chmod(0o755)
    for backend in BACKENDS:
        with tempfile.TemporaryDirectory() as folder:
            options = {
                "--backend": backend,
                "--base-url": address,
                "--model": model,
                "--tokenizer": str(MODEL_DIR),
                "--random-input-len": "32",
                "--random-output-len": "16",
                "--num-prompts": str(NUM_PROMPTS),
                "--result-dir": folder,
                "--result-filename": "result.json",
            }
            words = [word for option in options.items() for word in option]
            command = [str(program), "bench", "serve", "--ignore-eos", "--save-result", *words]
            subprocess.run(command, check=True, capture_output=True)
            result = json.loads((Path(folder) / "result.json").read_text())
        assert (result["completed"], result["failed"]) == (NUM_PROMPTS, 0), (backend, result)
        if backend != "openai-embeddings":
            assert result["total_output_tokens"] == 16 * NUM_PROMPTS, (backend, result)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
