"""Where the engine is going to run, as far as the driver alone can tell."""

from __future__ import annotations

import pytest

from aserve.host import environment
from aserve.host.environment import may_have_cuda, num_devices


def test_a_machine_without_the_driver_has_no_devices() -> None:
    assert num_devices("libno-such-driver.so.1") == 0


@pytest.mark.parametrize(
    ("option", "num_found", "expected"),
    [("auto", 1, True), ("auto", 0, False), ("cpu", 1, False), ("cuda", 0, True)],
)
def test_what_the_user_says_comes_before_what_is_found(
    option: str, num_found: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "num_devices", lambda library: num_found)
    assert may_have_cuda(option) is expected
