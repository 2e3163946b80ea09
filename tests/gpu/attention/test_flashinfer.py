"""The FlashInfer backend over a fake package, which computes attention from the arrays that its
plans were given, so that a wrong array gives a wrong result."""

from __future__ import annotations

import re
from contextlib import nullcontext
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from aserve.errors import BugError
from aserve.gpu.attention import registry
from aserve.gpu.attention.base import (
    AttentionKind,
    AttentionSite,
    AttentionUnavailable,
    Capabilities,
)
from aserve.gpu.attention.flashinfer.backend import KIND, FlashInfer, build_flashinfer
from aserve.gpu.attention.flashinfer.page_indices import KERNELS, CsrOps
from aserve.gpu.attention.flashinfer.plan import row_parts
from aserve.gpu.attention.flashinfer.wrappers import Queries, decode_bytes, queries_of
from aserve.gpu.attention.reference import TorchReference
from aserve.gpu.attention.registry import BACKENDS
from aserve.gpu.attention.triton import check_kv_dtype
from aserve.gpu.decode.base import StepRunner
from aserve.gpu.device.base import Device
from aserve.gpu.device.cpu.device import CpuDevice
from aserve.gpu.kv.layer_groups import AttentionInputs, LayerSpec, Mask, group_layers
from aserve.gpu.kv.pools import KvPools
from aserve.gpu.spec.base import DraftRows, Drafts
from aserve.gpu.spec.mode import Speculative
from aserve.gpu.step.forward_batch import ForwardBatch
from aserve.messages.base import array_i32
from tests.fakes.cuda import FakeCuda
from tests.fakes.drafters import Stumbling, StumblingTree, speculative
from tests.fakes.flashinfer import (
    LISTED_IN_TORCH,
    FakeDecode,
    FakeFlashInfer,
    FakePrefill,
    FakeWrapper,
)
from tests.fakes.graph_device import GraphDevice
from tests.fakes.hash_model import HashModel
from tests.gpu.attention.backend_parity import (
    HEAD_DIM,
    HEADS,
    SHAPES,
    Layout,
    assert_attends,
    exact_batch,
    fill,
    layer,
    random,
)
from tests.gpu.device.cuda.test_device import executor_on
from tests.gpu.device_tables import device_batch, make_pools
from tests.gpu.drive import captured, make_executor, request, serve
from tests.gpu.plain_engine import plain_outputs, plain_tokens

pytestmark = pytest.mark.usefixtures("small_workspace")

CAN_CAPTURE = Capabilities(can_capture=True)
PLAIN = Layout(layer())


def site_of(layout: Layout, pools: KvPools, device: Device | None = None) -> AttentionSite:
    groups = group_layers((layout.layer,))
    return AttentionSite(pools, groups, layout.dtype, device or CpuDevice())


def register(
    monkeypatch: pytest.MonkeyPatch,
    module: FakeFlashInfer,
    *,
    ops: CsrOps = KERNELS,
    capabilities: Capabilities = CAN_CAPTURE,
) -> None:
    """Replaces the default backend of the CPU."""
    kind = AttentionKind(capabilities, lambda site: build_flashinfer(module, site, ops=ops))
    monkeypatch.setattr(registry, "BACKENDS", {"flashinfer": lambda: kind})


def assert_parity(layout: Layout, shape: str) -> None:
    def build(pools: KvPools) -> FlashInfer:
        return FlashInfer(FakeFlashInfer(), site_of(layout, pools))

    assert_attends(build, layout, shape)


@pytest.mark.parametrize("page_size", [1, 16, 24])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_equals_the_reference(shape: str, page_size: int) -> None:
    assert_parity(Layout(layer(), page_size), shape)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(
    ("window", "softcap", "page_size"), [(None, 2.0, 4), (1, None, 1), (5, 2.0, 4), (16, None, 4)]
)
def test_every_kind_of_layer_equals_the_reference(
    window: int | None, softcap: float | None, page_size: int, heads: tuple[int, int]
) -> None:
    spec = layer(heads=heads, window=window, softcap=softcap)
    for shape in ("mixed", "decodes of all lengths"):
        assert_parity(Layout(spec, page_size), shape)


@pytest.mark.parametrize(("query_lens", "kv_lens"), [([3, 1], [0, 5]), ([1, 1], [6, 0])])
def test_kv_in_eight_bits_is_read_with_its_layers_scales(
    query_lens: list[int], kv_lens: list[int]
) -> None:
    spec = msgspec.structs.replace(layer(), kv_scales=(0.5, 4.0))
    pools = make_pools((spec,), 9, table_shape=(3, 4), dtype=torch.float8_e4m3fn)
    pools.page_tables[0][1:] = torch.arange(1, 9).view(2, 4)
    made = exact_batch(pools, query_lens, kv_lens)
    qkv = random(torch.Generator().manual_seed(3), made.num_tokens, 8, HEAD_DIM)
    package = FakeFlashInfer()
    backend = FlashInfer(package, site_of(Layout(spec), pools))
    got = backend.bind(made, backend.plan(made))(spec, AttentionInputs(qkv))
    expected = TorchReference(pools).bind(made, None)(spec, AttentionInputs(qkv))
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    (plan,) = package.plans
    assert (plan.q_dtype, plan.kv_dtype) == (torch.float64, torch.float8_e4m3fn)


def test_pages_before_the_window_are_not_listed() -> None:
    """Such pages may belong to other rows; a kernel that reads them would read their NaN."""
    layout = Layout(layer(window=5), page_size=4)
    pools = layout.pools(2)
    fill(pools, layout, device_batch([1, 2], [30, 17]))
    module = FakeFlashInfer()
    backend = FlashInfer(module, site_of(layout, pools))
    made = exact_batch(pools, [1, 2], [30, 17])
    backend.bind(made, backend.plan(made))
    table = pools.page_tables[1]
    # The token at 30 sees 26 to 30, those at 17 and 18 see 13 to 18.
    listed = [page for plan in module.plans for page in plan.pages.tolist()]
    assert listed == [*table[1, 6:8].tolist(), *table[2, 3:5].tolist()]


@pytest.mark.parametrize(
    ("heads", "query_lens", "wrapper"),
    [
        ((8, 2), [1, 1], FakeDecode),
        ((4, 2), [1, 1], FakeDecode),
        ((4, 2), [2, 1], FakePrefill),
        ((4, 2), [8], FakePrefill),
        ((4, 2), [70], FakePrefill),
    ],
)
def test_decodes_and_prompts_have_wrappers_of_their_own(
    heads: tuple[int, int], query_lens: list[int], wrapper: type[FakeWrapper]
) -> None:
    """Few heads that share keys decode without tensor cores. The kernels that the package chooses
    by default on Hopper neither share keys among heads nor split long rows, so only whole tiles of
    queries use them."""
    layout = Layout(layer(heads=heads))
    pools = layout.pools(2)
    module = FakeFlashInfer()
    backend = FlashInfer(module, site_of(layout, pools))
    backend.plan(exact_batch(pools, query_lens, [3] * len(query_lens)))
    (made,) = module.wrappers
    assert isinstance(made, wrapper)
    assert made.backend == ("auto" if query_lens == [70] else "fa2")
    assert not isinstance(made, FakeDecode) or made.use_tensor_cores == (heads == (8, 2))


@pytest.mark.parametrize("window", [None, 5])
def test_the_decodes_of_a_mixed_step_have_a_plan_of_their_own(window: int | None) -> None:
    """In the prompts' plan each would take a tile of 64 or 128 queries, which it leaves empty."""
    layout = Layout(layer(window=window), page_size=4)
    pools, module = layout.pools(4), FakeFlashInfer()
    query_lens, kv_lens = [1, 1, 70, 1], [9, 14, 3, 6]
    fill(pools, layout, device_batch(query_lens, kv_lens))
    backend = FlashInfer(module, site_of(layout, pools))
    made = exact_batch(pools, query_lens, kv_lens)
    backend.bind(made, backend.plan(made))
    decodes, others = module.plans
    assert [type(wrapper) for wrapper in module.wrappers] == [FakeDecode, FakePrefill]
    assert others.cu_query_lens is not None
    assert others.cu_query_lens.tolist() == [0, 70, 71]
    assert [len(plan.last_lens) for plan in (decodes, others)] == [2, 2]
    assert [int(plan.starts[0]) for plan in (decodes, others)] == [0, 0]
    first = 0 if window is None else 1
    assert decodes.pages[: 3 - first].tolist() == pools.page_tables[0][1, first:3].tolist()
    last = pools.page_tables[0][4, :2].tolist()
    assert others.pages[-2:].tolist() == last


@pytest.mark.parametrize(
    ("query_lens", "prefix_lens", "queries"),
    [
        ([1, 1], [4000, 0], Queries.DECODE),
        ([8192], [0], Queries.FULL_TILES),
        ([100, 300], [0, 0], Queries.FULL_TILES),
        ([2], [0], Queries.PARTIAL_TILES),
        ([500] + [1] * 255, [0] + [1000] * 255, Queries.PARTIAL_TILES),
        # The decode's tiles are few beside the prompt's.
        ([8192, 1], [0, 4000], Queries.FULL_TILES),
        # One row's keys are read for each head in one part.
        ([2000, 1], [0, 130_000], Queries.PARTIAL_TILES),
    ],
)
def test_rows_that_leave_tiles_empty_differ_from_prompts(
    query_lens: list[int], prefix_lens: list[int], queries: Queries
) -> None:
    own = np.array(query_lens, np.int32)
    assert queries_of(own, own + np.array(prefix_lens, np.int32)) is queries


def test_lengths_that_are_only_bounds_are_not_planned() -> None:
    pools = PLAIN.pools(1)
    backend = FlashInfer(FakeFlashInfer(), site_of(PLAIN, pools))
    assert KIND.capabilities.host_lens
    with pytest.raises(BugError, match="step 9: FlashInfer plans from exact lengths only"):
        backend.plan(ForwardBatch.init_new(device_batch([1], [3]), pools))


def test_plans_of_another_backend_are_refused() -> None:
    pools = PLAIN.pools(1)
    backend = FlashInfer(FakeFlashInfer(), site_of(PLAIN, pools))
    with pytest.raises(BugError, match="plan of another backend"):
        backend.bind(exact_batch(pools, [1], [0]), None)
    with pytest.raises(BugError, match="of another backend"):
        backend.static_plans.refresh(None, np.array([1], np.int32))


def test_its_kernels_are_compiled_before_it_is_chosen() -> None:
    """All are run on the padding row: two prefills, a decode, and a cascade."""
    pools = PLAIN.pools(1)
    module = FakeFlashInfer()
    before = pools.layers[0].keys[PLAIN.page_size :].clone()
    build_flashinfer(module, site_of(PLAIN, pools))
    is_decode = [plan.cu_query_lens is None for plan in module.plans]
    assert is_decode == [False, False, True, False, False]
    assert [plan.causal for plan in module.plans] == [True, True, True, False, True]
    ran = [wrapper.backend for wrapper in module.wrappers if wrapper.planned is not None]
    assert ran == ["auto", *["fa2"] * 4]
    after = pools.layers[0].keys[PLAIN.page_size :]
    torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Ninja build failed.\nnvcc: not found"),
        TypeError("plan() takes 8 positional arguments"),
        ImportError("libcudart.so.13: cannot open shared object file"),
    ],
)
def test_where_its_kernels_cannot_be_compiled_or_called_it_is_unavailable(error: Exception) -> None:
    """Another release may have other names; then the next backend of the order is used."""

    class Broken(FakeFlashInfer):
        def BatchDecodeWithPagedKVCacheWrapper(self, *args: object, **more: object) -> FakeDecode:
            raise error

    told = f"compiled or run: {type(error).__name__}: {str(error).splitlines()[0]}"
    with pytest.raises(AttentionUnavailable, match=re.escape(told)):
        build_flashinfer(Broken(), site_of(PLAIN, PLAIN.pools(1)))


@pytest.mark.parametrize("version", ["0.5.3", "0.2.9.post1"])
def test_an_older_version_is_unavailable(version: str) -> None:
    with pytest.raises(AttentionUnavailable, match=rf"has version {version}, but needs 0.6"):
        build_flashinfer(FakeFlashInfer(__version__=version), site_of(PLAIN, PLAIN.pools(1)))


@pytest.mark.parametrize(
    ("version", "is_slow"), [("0.6.18.post1", True), ("0.7.2.post1", False), ("1.0", False)]
)
def test_a_newer_version_is_taken_and_one_that_plans_slowly_is_named(
    version: str, caplog: pytest.LogCaptureFixture, *, is_slow: bool
) -> None:
    build_flashinfer(FakeFlashInfer(__version__=version), site_of(PLAIN, PLAIN.pools(1)))
    assert (f"FlashInfer {version} plans an eager step slowly" in caplog.text) == is_slow


def test_queries_that_lie_beside_keys_are_read_where_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A copy would be one more launch per layer, of about a dozen."""
    pools = PLAIN.pools(2)
    read: list[int] = []
    run = FakeDecode.run

    def running(wrapper: FakeDecode, q: Tensor, *pages: Any, **more: Any) -> Tensor:
        read.append(q.data_ptr())
        return run(wrapper, q, *pages, **more)

    monkeypatch.setattr(FakeDecode, "run", running)
    backend = FlashInfer(FakeFlashInfer(), site_of(PLAIN, pools))
    made = exact_batch(pools, [1, 1], [3, 4])
    heads = torch.zeros((2, 8, HEAD_DIM), dtype=PLAIN.dtype)
    backend.bind(made, backend.plan(made))(PLAIN.layer, AttentionInputs(heads))
    assert read == [heads.data_ptr()]


@pytest.mark.parametrize("captures", [False, True])
def test_an_engine_gives_the_plain_engines_tokens_planning_each_step_once(
    monkeypatch: pytest.MonkeyPatch, *, captures: bool
) -> None:
    """Chunks and mixed steps run eagerly. Decodes do or, padded, are replayed. Each of two groups
    has a plan, and two in a mixed step."""
    package = FakeFlashInfer()
    register(monkeypatch, package, ops=LISTED_IN_TORCH if captures else KERNELS)
    model, device = HashModel(window=6), GraphDevice()
    executor = make_executor(
        model,
        attention="flashinfer",
        device=device,
        graph_rows=4 if captures else 0,
        depth=2,
        lead=2,
        max_batched_tokens=16,
    )
    executor.capture_graphs(lambda _done, _total: None)
    before = package.num_plans
    prompts = ([i + j % 30 for j in range(length)] for i, length in enumerate((5, 40, 9)))
    asked = [request(f"r{i}", prompt, max_tokens=12) for i, prompt in enumerate(prompts)]
    served = serve(executor, asked, chaos=2)
    assert served.outputs == {(r.request_id, 0): plain_outputs(model, r) for r in asked}
    assert (device.num_replays > 10) == captures
    num_parts = [len(row_parts(array_i32(batch.query_lens))) for batch in served.batches]
    assert max(num_parts) == 2
    assert package.num_plans - before == 2 * sum(num_parts)


@pytest.mark.parametrize("seed", [None, 1])
def test_an_engine_whose_device_runs_behind_replays_with_plans_of_the_right_step(
    monkeypatch: pytest.MonkeyPatch, seed: int | None
) -> None:
    """A plan's pinned memory is written again only after its step, and the host never waits."""
    cuda = FakeCuda(seed)
    register(monkeypatch, FakeFlashInfer(pinned_memory=cuda.pinned), ops=LISTED_IN_TORCH)
    executor = executor_on(
        cuda,
        lambda where: HashModel(window=6, device=where),
        attention="flashinfer",
        graph_rows=2,
        depth=2,
        lead=2,
    )
    executor.capture_graphs(lambda _done, _total: None)
    asked = [request(f"r{i}", [5 + i, 7, 9 + i], max_tokens=12) for i in range(2)]
    served = serve(executor, asked)
    model = HashModel(window=6)
    assert served.outputs == {(r.request_id, 0): plain_outputs(model, r) for r in asked}
    assert cuda.num_replays > 8
    cuda.assert_sound()


def test_speculation_makes_an_engine_take_another_backend(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With speculation the host knows only bounds of the lengths, and cannot plan from them."""
    register(monkeypatch, FakeFlashInfer(), capabilities=Capabilities(host_lens=True))
    kinds = {**registry.BACKENDS, "paged-sdpa": BACKENDS["paged-sdpa"]}
    monkeypatch.setattr(registry, "BACKENDS", kinds)
    device = CpuDevice()
    device.attention = ("flashinfer", "paged-sdpa")
    model = HashModel()
    assert "attention flashinfer (auto)" in make_executor(model, device=device).about
    executor = make_executor(model, device=device, mode=speculative(Stumbling(1, every=2)))
    assert "attention paged-sdpa (auto, without flashinfer)" in executor.about
    assert "lengths that the host does not know yet" in caplog.text


@pytest.mark.parametrize("ops", [KERNELS, LISTED_IN_TORCH], ids=["kernels", "torch"])
@pytest.mark.parametrize("shape", ["verify windows", "mixed", "a page and one"])
@pytest.mark.parametrize(("window", "page_size"), [(None, 16), (None, 1), (5, 4), (1, 64)])
def test_draft_trees_equal_the_reference(
    window: int | None, page_size: int, shape: str, ops: CsrOps
) -> None:
    layout = Layout(layer(window=window), page_size)
    assert_attends(
        lambda pools: FlashInfer(FakeFlashInfer(), site_of(layout, pools), ops=ops),
        layout,
        shape,
        has_trees=True,
    )


def test_layers_without_a_causal_mask_equal_the_reference() -> None:
    for shape in ("verify windows", "mixed", "one decode"):
        assert_parity(Layout(msgspec.structs.replace(layer(), mask=Mask.NONE)), shape)
    spec = msgspec.structs.replace(layer(window=4), mask=Mask.NONE)
    layout = Layout(spec)
    with pytest.raises(AttentionUnavailable, match="no windows in layers without a causal mask"):
        build_flashinfer(FakeFlashInfer(), site_of(layout, layout.pools(1)))


def test_trees_are_verified_in_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter knows the text, as its own forwards could not be planned on the host."""
    module = FakeFlashInfer()
    capabilities = Capabilities(tree_masks=True, host_lens=True, can_capture=True)
    register(monkeypatch, module, ops=LISTED_IN_TORCH, capabilities=capabilities)
    model, device = HashModel(window=6), GraphDevice()
    asked = request("r", [5, 7, 9], max_tokens=30)
    text = torch.tensor([5, 7, 9, *plain_outputs(model, asked), 0, 0])

    def known(_self: Stumbling, _runner: StepRunner, rows: DraftRows) -> Drafts:
        places = rows.lens[:, None] + 1 + torch.arange(rows.num_drafts)
        return Drafts(text[places.clamp(max=len(text) - 1)])

    monkeypatch.setattr(Stumbling, "draft", known)
    executor = make_executor(
        model,
        attention="flashinfer",
        mode=Speculative(StumblingTree()),
        device=device,
        graph_rows=1,
    )
    served = serve(captured(executor), [asked])
    assert served.outputs == plain_tokens([asked], model)
    assert len(served.batches) < 15
    assert device.num_replays > 5


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "num_rows", "mib"),
    [(64, 8, 512, 386), (40, 8, 1024, 423), (128, 8, 256, 515), (16, 8, 1, 1)],
)
def test_the_workspace_has_room_for_a_tile_of_each_row_of_a_captured_decode(
    num_heads: int, num_kv_heads: int, num_rows: int, mib: int
) -> None:
    """The sizes in MiB are those that FlashInfer 0.6.3 computes for heads of 128 elements."""
    spec = LayerSpec(0, num_heads, num_kv_heads, 128, 1.0)
    assert decode_bytes(spec, num_rows) == pytest.approx(mib * (1 << 20), abs=1 << 20)


@pytest.mark.parametrize(
    ("capability", "dtype", "is_refused"),
    [
        ((8, 6), torch.float8_e4m3fn, True),
        ((8, 9), torch.float8_e4m3fn, False),
        ((8, 0), torch.bfloat16, False),
    ],
)
def test_kv_of_eight_bits_is_refused_where_its_store_cannot_be_compiled(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    dtype: torch.dtype,
    *,
    is_refused: bool,
) -> None:
    """Triton has E4M3 from Ada on; before, the start would end in its compiler."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    expected = pytest.raises(AttentionUnavailable, match="8, 9") if is_refused else nullcontext()
    with expected:
        check_kv_dtype(torch.device("cuda"), dtype)


def test_a_lack_of_memory_does_not_make_the_backend_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def compile_kernels(_backend: FlashInfer) -> None:
        raise torch.OutOfMemoryError("no memory, as the test wants it")

    monkeypatch.setattr(FlashInfer, "compile_kernels", compile_kernels)
    with pytest.raises(torch.OutOfMemoryError):
        build_flashinfer(FakeFlashInfer(), site_of(PLAIN, PLAIN.pools(1)))
