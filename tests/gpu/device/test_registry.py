"""Which device is taken, and that it says why."""

from __future__ import annotations

import pytest
import torch

from aserve.errors import ConfigError
from aserve.gpu.device.cuda.device import why_no_cuda
from aserve.gpu.device.registry import open_device

HAS_CUDA = torch.cuda.is_available()


def test_auto_takes_cuda_where_it_is_and_says_why_else() -> None:
    device = open_device("auto")
    assert device.torch_device.type == ("cuda" if HAS_CUDA else "cpu")
    assert "auto" in device.about
    assert HAS_CUDA or why_no_cuda() in device.about


def test_a_device_that_was_asked_for_by_name_needs_no_reason() -> None:
    assert open_device("cpu").about == "cpu"


def test_an_unknown_device_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'tpu' is not supported; supported: auto, cpu, cuda"):
        open_device("tpu")


def test_cuda_where_there_is_none_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"no CUDA: torch .*; take --device cpu or auto"):
        open_device("cuda")
