"""The parts of gpu-check by name: the module that measures each, and the packages that it needs.

NOTE: it imports no part, because a part's module is imported in the part's own process.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from aserve.bench.catalog import BENCHES
from aserve.gpu.spec.registry import ALGORITHMS

ROOT = Path(__file__).parents[2]
MARK = "mark.gpu"  # a file with tests for a GPU contains it

ENGINE = ("numpy", "msgspec", "torch", "transformers", "tokenizers", "safetensors", "jinja2")
TEXT = (*ENGINE, "aiohttp", "prometheus_client", "rich")  # the imports of `aserve.frontend`


@dataclass(frozen=True, slots=True)
class Part:
    """A part whose `module` has `measure(setting, argument) -> Figures`. It is killed after
    `limit_s` seconds.
    """

    about: str
    module: str
    argument: str = ""
    needs: tuple[str, ...] = TEXT
    needs_gpu: bool = False  # else a dry run on the CPU is possible
    num_gpus: int = 1
    limit_s: float = 470.0

    def missing(self) -> str:
        """Returns the first required package that is not installed, or an empty text."""
        for name in self.needs:
            if importlib.util.find_spec(name) is None:
                return name
        return ""


HERE = "tools.gpu_check."
QUANTIZATIONS = ("fp8", "int8", "int4")
MEASURES: Mapping[str, Part] = {
    "limits": Part(
        "copy bandwidth and bf16 matrix rate", HERE + "ceilings", needs=("torch", "msgspec")
    ),
    "decode-small": Part("decode steps, small model", HERE + "decode", "small"),
    "decode-large": Part("decode steps, large model", HERE + "decode", "large"),
    **{
        f"quantized-{name}": Part(
            f"decode steps with weights of {name} against bfloat16, large model",
            *(HERE + "quantized", name),
        )
        for name in QUANTIZATIONS
    },
    "prefill": Part("one long prompt, large model", HERE + "prefill"),
    "pieces": Part("short prompts in captured pieces against eager ones", HERE + "pieces"),
    **{
        f"speculation-{name}": Part(
            f"the drafts of {name} against plain decoding", HERE + "speculation", name
        )
        for name in ALGORITHMS
    },
    "ranks-one": Part("one rank by NCCL, with sums in graphs", HERE + "ranks", "one"),
    "ranks-two": Part(
        "two ranks against one GPU", HERE + "ranks", "two", needs_gpu=True, num_gpus=2
    ),
    "offline": Part("the load in the READMEs of other engines", HERE + "published"),
    "overlap": Part("two steps in flight against one", HERE + "overlap"),
    "http": Part("streaming clients against the engine's own rate", HERE + "http_load"),
    "start": Part("time until the server is ready", HERE + "start"),
    **{
        f"bench-{name}": Part(f"aserve bench {name}", HERE + "other_bench", name)
        for name in ("kernels", "relay", "host-step", "overlap-sim")
        if name in BENCHES
    },
}
TEST_NEEDS = (*TEXT, "pytest", "pytest_asyncio", "pytest_timeout", "hypothesis")


def all_parts() -> dict[str, Part]:
    """Returns all parts, with one for each file of GPU tests. An installed aserve has no tests."""
    tests = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if _may_be_marked(path):
            where = path.relative_to(ROOT)
            about = f"tests marked gpu in {where}"
            name = "-".join(("tests", *where.parts[1:-1], path.stem.removeprefix("test_")))
            tests[name] = Part(
                about, HERE + "marked_tests", str(where), needs=TEST_NEEDS, needs_gpu=True
            )
    return {"limits": MEASURES["limits"], **tests, **MEASURES}


def _may_be_marked(path: Path) -> bool:
    """Returns whether the file, or the conftest.py of its folder, has the mark."""
    files = (path, path.with_name("conftest.py"))
    return any(MARK in file.read_text(encoding="utf-8") for file in files if file.exists())
