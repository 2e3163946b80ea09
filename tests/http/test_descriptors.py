"""As many connections are allowed as the process may open files for."""

from __future__ import annotations

import resource

import pytest

from aserve.http.connection import LEAST_OTHER_FILES, OTHER_FILES, descriptors_for


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "raised", "expected"),
    [
        (10_000, 10_000, 100, None, 100),
        (1024, 100_000, 4096, 4096 + OTHER_FILES, 4096),
        (1024, 2048, 4096, 2048, 2048 - OTHER_FILES),
        (1024, resource.RLIM_INFINITY, 4096, 4096 + OTHER_FILES, 4096),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 4096, None, 4096),
        (256, 256, 4096, 256, 128),
        (200, 200, 4096, 200, 200 - LEAST_OTHER_FILES),
        (64, 64, 4096, 64, 1),
    ],
)
def test_the_soft_limit_is_raised_as_far_as_needed_and_allowed(
    monkeypatch: pytest.MonkeyPatch,
    soft: int,
    hard: int,
    wanted: int,
    raised: int | None,
    expected: int,
) -> None:
    set_to = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: set_to.append(limits))
    assert descriptors_for(wanted) == expected
    assert set_to == ([] if raised is None else [(raised, hard)])
