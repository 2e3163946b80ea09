"""What pytest has collected for this run, before any test is deselected."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
# The tests of MLX run where it is installed (`aserve[mlx]`).
IGNORED = () if find_spec("mlx") else ("*/test_mlx_*.py",)

# By the path of each file that has tests, whether one of them is marked gpu.
HAS_GPU_TESTS = pytest.StashKey[dict[str, bool]]()


def note_collected(config: pytest.Config, items: list[pytest.Item]) -> None:
    found: dict[str, bool] = {}
    for item in items:
        path = str(item.path.relative_to(config.rootpath))
        found[path] = found.get(path, False) or item.get_closest_marker("gpu") is not None
    config.stash[HAS_GPU_TESTS] = found


def all_files() -> set[str]:
    """The paths of all files with tests that pytest collects on this machine."""
    paths = (path for path in TESTS.rglob("test_*.py") if not any(map(path.match, IGNORED)))
    return {str(path.relative_to(TESTS.parent)) for path in paths}
