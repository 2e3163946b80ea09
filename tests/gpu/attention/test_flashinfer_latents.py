"""FlashInfer's wrapper of latents over the fake package, alone and below `LatentBackend`."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
import torch

from aserve.gpu.attention.base import AttentionSite, AttentionUnavailable, StaticShape
from aserve.gpu.attention.flashinfer.backend import KIND, FlashInfer, build_flashinfer
from aserve.gpu.attention.latents import LatentBackend
from aserve.gpu.models.latent_attention import LatentInputs
from aserve.gpu.step.forward_batch import ForwardBatch
from tests.fakes.flashinfer import LISTED_IN_TORCH, FakeFlashInfer
from tests.gpu.attention.backend_parity import SHAPES, Layout, assert_attends, latent_layer, layer
from tests.gpu.attention.test_flashinfer import site_of
from tests.gpu.attention.test_flashinfer_replan import LENGTHS, Replays
from tests.gpu.attention.test_latents import LAYER, attend, filled, inputs_of, naive
from tests.gpu.device_tables import device_batch

pytestmark = pytest.mark.usefixtures("small_workspace")

DEEPSEEK = latent_layer(2, value_dim=512, rope_dim=64)


@pytest.mark.parametrize("page_size", [1, 16, 24])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_equals_the_reference(shape: str, page_size: int) -> None:
    layout = Layout(latent_layer(), page_size)
    assert_attends(
        lambda pools: FlashInfer(FakeFlashInfer(), site_of(layout, pools)), layout, shape
    )


@pytest.mark.parametrize("width", [1, 3])
def test_a_refresh_is_one_call_of_the_compiled_planner(width: int) -> None:
    """Missing rows are padded; lengths and page tables change between replays."""
    package = FakeFlashInfer()
    replays = Replays(Layout(latent_layer(), page_size=4), StaticShape(4, width, 40), package)
    before = len(package.plans), package.num_plans
    replays.assert_right()
    assert (len(package.plans), package.num_plans) == (before[0], before[1] + len(LENGTHS))


def test_a_forward_that_was_padded_since_it_was_planned_is_planned_anew() -> None:
    """One row is expanded and one absorbed; the padded forward has three rows more, which the plan
    of the package lacks."""
    layout, package = Layout(LAYER), FakeFlashInfer()
    batch = replace(device_batch([40, 1], [0, 9]), is_exact=True)
    pools = filled(layout, batch)
    inner = FlashInfer(package, site_of(layout, pools))
    backend = LatentBackend(inner, pools, LAYER, min_queries=16)
    made = ForwardBatch.init_new(batch, pools)
    inputs = inputs_of(made.num_tokens + 3, torch.float64)
    own = LatentInputs(inputs.q[:41], inputs.latents[:41], inputs.up)
    expected = naive(pools, made, own)
    torch.testing.assert_close(attend(backend, made, own), expected, rtol=1e-10, atol=1e-10)
    plan, padded, num_plans = backend.plan(made), made.padded(5), package.num_plans
    made.mark_attention_planned(plan, replan_equivalent=True)
    assert made.padded(5).needs_attention_plan()
    got = backend.bind(padded, plan).attend_latents(LAYER, inputs)  # type: ignore[attr-defined]  # a LatentAttend
    assert package.num_plans == num_plans + 1
    assert package.plans[-1].starts.tolist() == [0, 1, 2, 3, 4]  # the absorbed row and padding
    torch.testing.assert_close(got[:41], expected, rtol=1e-10, atol=1e-10)


def test_the_sizes_of_deepseek_are_taken_and_others_refused() -> None:
    """Those that are refused go to the next backend of the device, the Triton kernel."""

    def site(**changes: object) -> AttentionSite:
        layout = Layout(msgspec.structs.replace(DEEPSEEK, **changes), dtype=torch.bfloat16)
        return site_of(layout, layout.pools(1))

    def build(site: AttentionSite) -> None:
        build_flashinfer(FakeFlashInfer(), site, ops=LISTED_IN_TORCH)

    build(site())
    on_cuda = replace(KIND.capabilities, devices=None)
    assert not [*on_cuda.refusals(site())]
    fp8 = Layout(DEEPSEEK, dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn)
    for refused, message in (
        (site(value_dim=448), "512 \\+ 64 values"),
        (site(softcap=3.0), "512 \\+ 64 values"),
        (site(value_dim=None), "head_dim 576 in layers of latents only"),
        (replace(site(), has_tree_masks=True), "tree masks with latent KV"),
        (site_of(fp8, fp8.pools(1)), "in the dtype of the model"),
    ):
        with pytest.raises(AttentionUnavailable, match=message):
            build(refused)


def test_a_release_whose_plans_have_workspaces_of_their_own_is_not_used_for_latents() -> None:
    """Its other wrappers are used as before."""

    class Rewritten(FakeFlashInfer):
        MLAPlanMetadata = object

    layouts = Layout(DEEPSEEK, dtype=torch.bfloat16), Layout(layer())
    sites = [site_of(layout, layout.pools(1)) for layout in layouts]
    with pytest.raises(AttentionUnavailable, match=r"from 0\.7 on; 0\.6 can"):
        build_flashinfer(Rewritten(), sites[0])
    build_flashinfer(FakeFlashInfer(), sites[0])
    build_flashinfer(Rewritten(), sites[1])
