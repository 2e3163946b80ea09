"""The kernel modules of FlashInfer are compiled in one build, before a plan needs the first."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import pytest

from aserve.gpu.attention.base import AttentionSite
from aserve.gpu.attention.flashinfer import kernel_modules
from aserve.gpu.attention.flashinfer.backend import build_flashinfer
from aserve.gpu.kv.layer_groups import LayerSpec
from tests.fakes.flashinfer import FakeFlashInfer, FakeJit, FakeModule
from tests.gpu.attention.backend_parity import layer, scattered_site

pytestmark = pytest.mark.usefixtures("small_workspace")

LATENTS = LayerSpec(0, 16, 1, 576, 0.1, value_dim=512)


def site_of(*layers: LayerSpec) -> AttentionSite:
    return scattered_site(layers, (2, 12), page_size=16)


def windows(*kinds: int | None, heads: tuple[int, int] = (4, 2)) -> Iterator[LayerSpec]:
    for i, window in enumerate(kinds):
        own = layer(heads=heads, window=window)
        yield LayerSpec(i, own.num_heads, own.num_kv_heads, own.head_dim, own.scale, window)


@pytest.mark.parametrize(
    ("layers", "names"),
    [
        (tuple(windows(None)), ["decode", "prefill fa2", "prefill fa3"]),
        (tuple(windows(None, heads=(8, 2))), ["prefill fa2", "prefill fa3"]),
        (
            tuple(windows(None, 5)),
            [
                *("decode", "prefill fa2", "prefill fa3"),
                *("decode window", "prefill fa2 window", "prefill fa3 window"),
            ],
        ),
        ((LATENTS,), ["mla"]),
    ],
    ids=["plain", "tensor cores", "windows", "latents"],
)
def test_all_modules_are_compiled_in_one_build(
    layers: tuple[LayerSpec, ...], names: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """One after another they take as many times as long. A second engine compiles none."""
    caplog.set_level(logging.INFO)
    package, site = FakeFlashInfer(), site_of(*layers)
    build_flashinfer(package, site)
    (build,) = package.jit.builds
    assert build == [*names, "cascade"]
    assert set(package.jit.loaded) <= set(build)
    assert len(package.jit.loaded) == len({*package.jit.loaded})
    assert f"{len(build)} modules together" in caplog.text
    caplog.clear()
    del package.jit.loaded[:]  # as in another process
    build_flashinfer(package, site)
    assert (package.jit.builds, caplog.text) == ([build], "")


def test_trees_and_padding_need_no_module_that_was_not_compiled() -> None:
    site = site_of(*windows(None, 5))
    site = AttentionSite(
        site.pools, site.groups, site.dtype, site.device, has_tree_masks=True, num_plans=2
    )
    package = FakeFlashInfer()
    build_flashinfer(package, site)
    assert len(package.jit.builds) == 1


def test_a_long_build_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first start takes minutes, and without a line it looks as if it hung."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(kernel_modules, "PROGRESS_S", 0.01)
    build = FakeJit.build_jit_specs

    def slowly(jit: FakeJit, specs: list[FakeModule]) -> None:
        build(jit, specs[:1])
        time.sleep(0.1)
        build(jit, specs[1:])

    monkeypatch.setattr(FakeJit, "build_jit_specs", slowly)
    build_flashinfer(FakeFlashInfer(), site_of(*windows(None)))
    assert "1 of 4 modules are done after 0 s" in caplog.text
    assert "compiled 4 modules of FlashInfer in 0 s" in caplog.text


def test_where_modules_cannot_be_built_together_each_plan_compiles_its_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The compilers of a parallel build may run out of memory, and another release may have other
    names; neither makes FlashInfer unavailable."""

    def fail(_jit: FakeJit, specs: list[FakeModule]) -> None:
        if len(specs) > 1:
            raise RuntimeError("Ninja build failed.\nKilled")
        _jit.builds.append([specs[0].name])

    monkeypatch.setattr(FakeJit, "build_jit_specs", fail)
    package = FakeFlashInfer()
    build_flashinfer(package, site_of(*windows(None)))
    assert [len(build) for build in package.jit.builds] == [1, 1, 1, 1]
    assert "RuntimeError: Ninja build failed." in caplog.text
    monkeypatch.setattr(FakeJit, "core", object())
    build_flashinfer(FakeFlashInfer(), site_of(*windows(None)))
    assert "AttributeError" in caplog.text


def test_the_package_is_left_as_it_was() -> None:
    package = FakeFlashInfer()
    before = package.jit.JitSpec.build_and_load
    calls = [lambda: package.jit.load("one"), lambda: 1 / 0]
    with pytest.raises(ZeroDivisionError):
        kernel_modules.needed_modules(package.jit, calls)
    assert package.jit.JitSpec.build_and_load is before
    assert package.jit.loaded == []
