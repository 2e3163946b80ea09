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

ON = {"use_sliding_window": True}
SWITCHED = {**ON, "sliding_window": 8}
NONE_FULL = {**SWITCHED, "max_window_layers": 0}


def every(period: int) -> Callable[[Fields], Windows]:
    """Each last layer of a period has no window."""
    return lambda given: periodic_windows(given, period)


def fields(**values: object) -> Fields:
    return Fields({"num_hidden_layers": 4, **values}, source="config.json")


@pytest.mark.parametrize(
    ("read", "values", "windows"),
    [
        (one_window, {"sliding_window": 8}, (8,) * 4),
        (one_window, {"sliding_window": None}, (None,) * 4),
        # The layer types count, or else a number of layers without a window.
        (switched_windows, {**SWITCHED, "max_window_layers": 3}, (None, None, None, 8)),
        (switched_windows, {**SWITCHED, "max_window_layers": 9}, (None,) * 4),
        (switched_windows, {**NONE_FULL, "layer_types": [SLIDING, FULL] * 2}, (8, None, 8, None)),
        (switched_windows, {"sliding_window": 8, "layer_types": [SLIDING] * 4}, (None,) * 4),
        (every(2), {"sliding_window": 8}, (8, None, 8, None)),
        (every(3), {"sliding_window": 8}, (8, 8, None, 8)),
        (
            every(2),
            {"sliding_window": 8, "layer_types": [FULL] * 3 + [SLIDING]},
            (None,) * 3 + (8,),
        ),
    ],
)
def test_windows_are_those_of_the_configuration(
    read: Callable[[Fields], Windows], values: dict[str, Any], windows: Windows
) -> None:
    assert read(fields(**values)) == windows


@pytest.mark.parametrize(
    ("read", "values", "complaint"),
    [
        (one_window, {"sliding_window": 0}, "sliding_window is 0; expected an integer"),
        (switched_windows, SWITCHED, "max_window_layers is missing"),
        (switched_windows, {**ON, "max_window_layers": 0}, "sliding_window is missing"),
        (switched_windows, {**NONE_FULL, "layer_types": [FULL]}, "expected a list of 4 strings"),
        (
            switched_windows,
            {**NONE_FULL, "layer_types": ["mamba"] * 4},
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
