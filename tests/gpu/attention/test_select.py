"""Which attention backend an engine gets, and the errors when none is usable."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from aserve.errors import BugError, ConfigError
from aserve.gpu.attention import registry
from aserve.gpu.attention.base import (
    AttentionKind,
    AttentionSite,
    AttentionUnavailable,
    Capabilities,
)
from aserve.gpu.attention.reference import TorchReference
from aserve.gpu.attention.registry import BACKENDS
from aserve.gpu.attention.select import build_attention
from aserve.gpu.device.cpu.device import CpuDevice
from aserve.gpu.kv.layer_groups import group_layers
from aserve.gpu.step.forward_batch import ForwardBatch
from tests.gpu.attention.backend_parity import Layout, layer
from tests.gpu.device_tables import device_batch

CPU_ORDER = CpuDevice().attention


def site(**changes: object) -> AttentionSite:
    """One layer in float32 with pages of 16; `changes` are fields of the layout."""
    layout = dataclasses.replace(Layout(layer(), dtype=torch.float32), **changes)  # type: ignore[arg-type]  # fields by name
    return AttentionSite(layout.pools(1), group_layers((layout.layer,)), layout.dtype, CpuDevice())


def kind(**capabilities: Any) -> AttentionKind:
    return AttentionKind(Capabilities(**capabilities), lambda site: TorchReference(site.pools))


def failing(error: Exception) -> Callable[..., Any]:
    def fail(*_: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float32, "paged-cpu"),
        (torch.bfloat16, "paged-cpu"),
        (torch.float64, "paged-sdpa"),
        (torch.float16, "paged-sdpa"),
    ],
)
def test_the_cpu_uses_its_kernels_for_the_dtypes_that_they_support(
    dtype: torch.dtype, name: str
) -> None:
    assert build_attention("auto", site(dtype=dtype), order=CPU_ORDER).name == name


def test_only_deterministic_backends_are_chosen_where_that_is_required() -> None:
    fixed = dataclasses.replace(site(), is_deterministic=True)
    assert build_attention("auto", fixed, order=CPU_ORDER[::-1]).name == "paged-cpu"
    with pytest.raises(ConfigError, match="torch-ref does not support --deterministic"):
        build_attention("torch-ref", fixed, order=CPU_ORDER)


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (lambda: kind(head_dims=frozenset({4})), "does not support head_dim 8 (has 4)"),
        (failing(ModuleNotFoundError("No module named 'numba'")), "cannot be imported: No module"),
        (failing(AttributeError("'cutlass' has no attribute 'torch'")), "cannot be imported: 'cut"),
        (
            lambda: AttentionKind(Capabilities(), failing(AttentionUnavailable("has no nvcc"))),
            "has no nvcc",
        ),
    ],
)
def test_an_unusable_backend_is_passed_over_with_a_warning_if_there_is_another(
    load: Callable[[], AttentionKind],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(registry, "BACKENDS", {"fast": load, "plain": kind})
    first = build_attention("auto", site(), order=("plain", "fast"))
    first.warn()
    assert (first.name, first.why, caplog.text) == ("plain", "auto", "")
    found = build_attention("auto", site(), order=("fast", "plain"))
    found.warn()
    assert (found.name, found.why) == ("plain", "auto, without fast")
    assert f"fast {reason}" in caplog.text
    with pytest.raises(ConfigError) as caught:
        build_attention("auto", site(), order=("fast",))
    assert f"fast {reason}" in caught.value.message


@pytest.mark.parametrize(
    ("capabilities", "changes", "words"),
    [
        ({"devices": frozenset({"cuda"})}, {}, "device cpu (has cuda)"),
        ({"dtypes": frozenset({torch.float16})}, {}, "dtype float32 (has float16)"),
        ({}, {"kv_dtype": torch.float16}, "KV of float16 (has float32)"),
        ({"head_dims": frozenset({64, 128})}, {}, "head_dim 8 (has 64, 128)"),
        ({"page_sizes": frozenset({1})}, {}, "page size 16 (has 1)"),
        ({"windows": False}, {"layer": layer(window=4)}, "sliding windows"),
        ({"softcaps": False}, {"layer": layer(softcap=4.0)}, "soft caps"),
    ],
)
def test_a_named_backend_that_is_unusable_is_refused_with_value_and_limit(
    monkeypatch: pytest.MonkeyPatch,
    capabilities: dict[str, Any],
    changes: dict[str, object],
    words: str,
) -> None:
    wide = kind(kv_dtypes=frozenset({torch.float16}))
    kinds = {"narrow": lambda: kind(**capabilities), "wide": lambda: wide}
    monkeypatch.setattr(registry, "BACKENDS", kinds)
    with pytest.raises(ConfigError) as caught:
        build_attention("narrow", site(**changes), order=("narrow", "wide"))
    assert f"narrow does not support {words}. Use one of: auto, wide" in caught.value.message
    assert caught.value.param == "attention_backend"


def test_an_unknown_name_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"'paged' is not known; known: auto, .*torch-ref"):
        build_attention("paged", site(), order=CPU_ORDER)


@pytest.mark.parametrize("name", ["paged-cpu", "paged-sdpa", "triton"])
def test_a_plan_of_another_backend_is_refused(name: str) -> None:
    made = site()
    batch = ForwardBatch.init_new(device_batch([1], [0]), made.pools)
    with pytest.raises(BugError, match="plan of another backend"):
        BACKENDS[name]().build(made).bind(batch, None)
