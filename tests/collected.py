"""What pytest has collected for this run, before any test is deselected."""

from __future__ import annotations

import pytest

# By the path of each file that has tests, whether one of them is marked gpu.
HAS_GPU_TESTS = pytest.StashKey[dict[str, bool]]()


def note_collected(config: pytest.Config, items: list[pytest.Item]) -> None:
    found: dict[str, bool] = {}
    for item in items:
        path = item.location[0]
        found[path] = found.get(path, False) or item.get_closest_marker("gpu") is not None
    config.stash[HAS_GPU_TESTS] = found
