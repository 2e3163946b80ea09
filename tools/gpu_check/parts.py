"""The parts by name: what each shows, which module measures it, and what it needs to run.

Must stay quick to import: a part's module is imported in the part's own process.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from aserve.bench.catalog import BENCHES

ROOT = Path(__file__).parents[2]
MARK = "mark.gpu"  # what a file with tests for a GPU has in it

ENGINE = ("numpy", "msgspec", "torch", "transformers", "tokenizers", "safetensors", "jinja2")
TEXT = (*ENGINE, "aiohttp", "prometheus_client", "rich")  # what `aserve.frontend` imports


@dataclass(frozen=True, slots=True)
class Part:
    """`module` has `measure(setting, argument) -> Figures`. A part that has not ended after
    `limit_s` seconds is killed.
    """

    about: str
    module: str
    argument: str = ""
    needs: tuple[str, ...] = TEXT
    needs_gpu: bool = False  # else it can run dry on the CPU
    limit_s: float = 470.0

    def missing(self) -> str:
        """The first package that it needs and that is not here."""
        for name in self.needs:
            if importlib.util.find_spec(name) is None:
                return name
        return ""


HERE = "tools.gpu_check."
MEASURES: Mapping[str, Part] = {
    "limits": Part(
        "copy bandwidth and bf16 matrix rate", HERE + "ceilings", needs=("torch", "msgspec")
    ),
    "decode-small": Part("decode steps, small model", HERE + "decode", "small"),
    "decode-large": Part("decode steps, large model", HERE + "decode", "large"),
    "prefill": Part("one long prompt, large model", HERE + "prefill"),
    "offline": Part("the load of other engines' READMEs", HERE + "published"),
    "overlap": Part("two steps in flight against one", HERE + "overlap"),
    "http": Part("streaming clients against the engine's own rate", HERE + "http_load"),
    "start": Part("until the server is ready", HERE + "start"),
    **{
        f"bench-{name}": Part(f"aserve bench {name}", HERE + "other_bench", name)
        for name in ("kernels", "relay", "host-step", "overlap-sim")
        if name in BENCHES
    },
}
TEST_NEEDS = (*TEXT, "pytest", "pytest_asyncio", "pytest_timeout", "hypothesis")


def all_parts() -> dict[str, Part]:
    """With one part for each file of tests that a GPU must run; an installed aserve has none."""
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
    """A mark stands in the file itself, or in the settings of its folder."""
    files = (path, path.with_name("conftest.py"))
    return any(MARK in file.read_text(encoding="utf-8") for file in files if file.exists())
