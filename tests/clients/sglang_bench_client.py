"""SGLang's `benchmark.serving`, with its native backend and the two of OpenAI's API.

The benchmark imports a little of SGLang's engine, which needs packages for GPUs. Stand-ins take its
place, so that only the benchmark itself is run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import tempfile
import types
from pathlib import Path
from unittest.mock import MagicMock

from aserve.tiny import MODEL_DIR

BACKENDS = ("sglang", "sglang-oai", "sglang-oai-chat")
PACKAGES = ("sglang", "sglang.srt", "sglang.srt.utils", "sglang.srt.disaggregation")
UNUSED = ("sglang.srt.disaggregation.utils", "sglang.srt.environ", "datasets")
NUM_PROMPTS = 20


def put_stand_ins() -> None:
    """Imports packages without their __init__, and does not import unused modules at all."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    root = Path(spec.submodule_search_locations[0]).parent
    for name in PACKAGES:
        package = types.ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")))]
        sys.modules[name] = package
    sys.modules.update({name: MagicMock() for name in UNUSED})


def main(address: str, model: str) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    put_stand_ins()
    from sglang.benchmark.serving import cli_main

    for backend in BACKENDS:
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "result.jsonl"
            options = {
                "--backend": backend,
                "--base-url": address,
                "--model": model,
                "--tokenizer": str(MODEL_DIR),
                "--dataset-name": "random-ids",
                "--random-input-len": "32",
                "--random-output-len": "16",
                "--random-range-ratio": "1",
                "--num-prompts": str(NUM_PROMPTS),
                "--output-file": str(output),
            }
            sys.argv[1:] = [
                "--disable-tqdm",
                *(word for option in options.items() for word in option),
            ]
            with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
                cli_main()
            result = json.loads(output.read_text())
        assert result["completed"] == NUM_PROMPTS, (backend, result)
        assert result["total_output_tokens"] == 16 * NUM_PROMPTS, (backend, result)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
