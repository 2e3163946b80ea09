"""Which attention backend an engine gets, and the errors when none is usable."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from aserve.config import MachineOptions
from aserve.errors import ConfigError
from aserve.gpu.attention import registry
from aserve.gpu.attention.base import (
    AttentionKind,
    AttentionSite,
    AttentionUnavailable,
    Capabilities,
)
from aserve.gpu.attention.reference import TorchReference
from aserve.gpu.attention.registry import BACKENDS, build_attention
from aserve.gpu.device.cpu.device import CpuDevice
from aserve.gpu.kv.layer_groups import group_layers
from aserve.option import options_of
from tests.fakes.hash_model import HashModel
from tests.gpu.attention.backend_parity import Layout, layer
from tests.gpu.drive import make_executor

CPU_ORDER = CpuDevice().attention


def site(**changes: object) -> AttentionSite:
    """One layer in float32 with pages of 16; `changes` are fields of the layout."""
    layout = dataclasses.replace(Layout(layer(), dtype=torch.float32), **changes)  # type: ignore[arg-type]  # fields by name
    return AttentionSite(layout.pools(1), group_layers((layout.layer,)), layout.dtype, CpuDevice())


def kind(capabilities: Capabilities) -> AttentionKind:
    return AttentionKind(capabilities, lambda site: TorchReference(site.pools))


def register(monkeypatch: pytest.MonkeyPatch, **kinds: AttentionKind) -> None:
    """Replaces the registered backends."""
    found = {name: (lambda kind=kind: kind) for name, kind in kinds.items()}
    monkeypatch.setattr(registry, "BACKENDS", found)


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


def test_backends_that_were_passed_over_are_logged_with_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = build_attention("auto", site(dtype=torch.float64), order=CPU_ORDER)
    found.warn()
    assert found.why == "auto, without paged-cpu"
    assert "paged-cpu does not support dtype float64 (has bfloat16, float32)" in caplog.text


def test_the_first_choice_needs_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    found = build_attention("auto", site(), order=CPU_ORDER)
    found.warn()
    assert found.why == "auto"
    assert "because" not in caplog.text


@pytest.mark.parametrize(
    "error",
    [
        ModuleNotFoundError("No module named 'numba'", name="numba"),
        AttributeError("module 'cutlass' has no attribute 'torch'"),
    ],
)
def test_a_backend_whose_package_cannot_be_imported_is_passed_over_with_a_warning(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing() -> AttentionKind:
        raise error

    monkeypatch.setattr(registry, "BACKENDS", {**BACKENDS, "paged-cpu": missing})
    found = build_attention("auto", site(), order=CPU_ORDER)
    found.warn()
    assert found.name == "paged-sdpa"
    assert f"paged-cpu cannot be imported: {error}" in caplog.text


def test_a_backend_that_cannot_be_built_is_passed_over_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(site: AttentionSite) -> TorchReference:
        raise AttentionUnavailable("cannot be compiled: no nvcc")

    register(monkeypatch, fast=AttentionKind(Capabilities(), fail), plain=kind(Capabilities()))
    found = build_attention("auto", site(), order=("fast", "plain"))
    found.warn()
    assert found.name == "plain"
    assert "fast cannot be compiled: no nvcc" in caplog.text


@pytest.mark.parametrize(
    ("capabilities", "changes", "words"),
    [
        (Capabilities(devices=frozenset({"cuda"})), {}, "device cpu (has cuda)"),
        (Capabilities(dtypes=frozenset({torch.float16})), {}, "dtype float32 (has float16)"),
        (Capabilities(head_dims=frozenset({64, 128})), {}, "head_dim 8 (has 64, 128)"),
        (Capabilities(page_sizes=frozenset({1})), {}, "page size 16 (has 1)"),
        (Capabilities(windows=False), {"layer": layer(window=4)}, "sliding windows"),
        (Capabilities(softcaps=False), {"layer": layer(softcap=4.0)}, "soft caps"),
    ],
)
def test_a_named_backend_that_is_unusable_is_refused_with_value_and_limit(
    monkeypatch: pytest.MonkeyPatch,
    capabilities: Capabilities,
    changes: dict[str, object],
    words: str,
) -> None:
    register(monkeypatch, narrow=kind(capabilities), wide=kind(Capabilities()))
    with pytest.raises(ConfigError) as caught:
        build_attention("narrow", site(**changes), order=("narrow", "wide"))
    assert f"narrow does not support {words}. Use one of: auto, wide" in caught.value.message
    assert caught.value.param == "attention_backend"


def test_kv_of_another_dtype_needs_a_backend_that_declares_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    half = dataclasses.replace(site(dtype=torch.float16), dtype=torch.float32)
    able = Capabilities(kv_dtypes=frozenset({torch.float16}))
    register(monkeypatch, own=kind(Capabilities()), casts=kind(able))
    assert build_attention("casts", half, order=()).name == "casts"
    with pytest.raises(ConfigError, match=r"own does not support KV of float16 \(has float32\)"):
        build_attention("own", half, order=())


def test_if_no_backend_is_usable_the_error_names_all_reasons(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = Capabilities(head_dims=frozenset({4}))
    register(monkeypatch, first=kind(small), second=kind(small))
    with pytest.raises(ConfigError, match=r"no .* first .* head_dim 8 .*; second .* Leave out"):
        build_attention("auto", site(), order=("first", "second"))


def test_an_unknown_name_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"'paged' is not known; known: auto, .*torch-ref"):
        build_attention("paged", site(), order=CPU_ORDER)


def test_the_option_offers_what_is_registered() -> None:
    options = {option.name: option for option in options_of(MachineOptions)}
    assert options["attention_backend"].limits.choices == ("auto", *BACKENDS)


def test_the_engine_says_which_backend_it_took_and_why() -> None:
    model = HashModel()
    assert "attention torch-ref (as asked)" in make_executor(model, attention="torch-ref").about
    assert "attention paged-sdpa (auto, without paged-cpu)" in make_executor(model).about
