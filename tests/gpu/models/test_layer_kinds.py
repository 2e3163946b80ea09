"""Windows of layers, however a configuration says them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from aserve.errors import ConfigError
from aserve.gpu.models.config.fields import Fields
from aserve.gpu.models.config.layer_types import (
    FULL,
    SLIDING,
    Windows,
    one_window,
    periodic_windows,
    switched_windows,
)

SWITCHED = {"use_sliding_window": True, "sliding_window": 8}


def fields(**values: object) -> Fields:
    return Fields({"num_hidden_layers": 4, **values}, source="config.json")


def test_one_window_is_that_of_every_layer() -> None:
    assert one_window(fields(sliding_window=8)) == (8,) * 4
    assert one_window(fields(sliding_window=None)) == (None,) * 4


def test_switched_windows_follow_the_layer_types_or_a_number() -> None:
    assert switched_windows(fields(**SWITCHED, max_window_layers=3)) == (None, None, None, 8)
    assert switched_windows(fields(**SWITCHED, max_window_layers=9)) == (None,) * 4
    kinds = [SLIDING, FULL] * 2
    named = fields(**SWITCHED, layer_types=kinds, max_window_layers=0)
    assert switched_windows(named) == (8, None, 8, None)


def test_windows_that_are_not_switched_on_are_none() -> None:
    assert switched_windows(fields(sliding_window=8, layer_types=[SLIDING] * 4)) == (None,) * 4


def test_periodic_windows_leave_each_last_layer_of_a_period_whole() -> None:
    assert periodic_windows(fields(sliding_window=8), 2) == (8, None, 8, None)
    assert periodic_windows(fields(sliding_window=8), 3) == (8, 8, None, 8)
    named = fields(sliding_window=8, layer_types=[FULL, FULL, SLIDING, FULL])
    assert periodic_windows(named, 2) == (None, None, 8, None)


@pytest.mark.parametrize(
    ("read", "values", "complaint"),
    [
        (one_window, {"sliding_window": 0}, "sliding_window is 0; expected an integer"),
        (switched_windows, SWITCHED, "max_window_layers is missing"),
        (
            switched_windows,
            {"use_sliding_window": True, "max_window_layers": 0},
            "sliding_window is missing",
        ),
        (
            switched_windows,
            {**SWITCHED, "max_window_layers": 0, "layer_types": [FULL]},
            "expected a list of 4 strings",
        ),
        (
            switched_windows,
            {**SWITCHED, "max_window_layers": 0, "layer_types": ["mamba"] * 4},
            "expected full_attention or sliding_attention for each layer",
        ),
    ],
)
def test_a_wrong_field_is_named(
    read: Callable[[Fields], Windows], values: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(fields(**values))
    assert complaint in str(caught.value)
