"""The FlashInfer backend over a fake package, which computes attention from the arrays that its
plans were given, so that a wrong array gives a wrong result."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from aserve.errors import BugError
from aserve.gpu.attention import registry
from aserve.gpu.attention.base import (
    AttentionBackend,
    AttentionKind,
    AttentionSite,
    AttentionUnavailable,
    Capabilities,
    StaticShape,
)
from aserve.gpu.attention.flashinfer import wrappers
from aserve.gpu.attention.flashinfer.backend import KIND, FlashInfer, build_flashinfer
from aserve.gpu.attention.flashinfer.page_indices import KERNELS, CsrOps
from aserve.gpu.attention.flashinfer.wrappers import Queries, queries_of
from aserve.gpu.attention.reference import TorchReference
from aserve.gpu.attention.registry import BACKENDS
from aserve.gpu.device.base import GraphBreak
from aserve.gpu.device.cpu.device import CpuDevice
from aserve.gpu.kv.layer_groups import AttentionInputs, group_layers
from aserve.gpu.kv.pools import KvPools
from aserve.gpu.step.forward_batch import DeviceBatch, ForwardBatch, ForwardOverrides
from aserve.messages.base import ArrayI32
from aserve.messages.executor import GroupSpec
from tests.fakes.cuda import FakeCuda
from tests.fakes.flashinfer import LISTED_IN_TORCH, FakeDecode, FakeFlashInfer, FakePrefill
from tests.fakes.graph_device import GraphDevice
from tests.fakes.hash_model import HashModel
from tests.fakes.two_token_mode import TwoTokens
from tests.gpu.attention.backend_parity import (
    HEAD_DIM,
    HEADS,
    SHAPES,
    TOLERANCES,
    Layout,
    attended,
    fill,
    layer,
    random,
)
from tests.gpu.device.cuda.test_device import executor_on
from tests.gpu.device_tables import CPU, device_batch
from tests.gpu.drive import make_executor, request, serve
from tests.gpu.plain_engine import plain_outputs
from tools.gpu_check.recorded_graphs import record


@pytest.fixture(autouse=True)
def _small_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrappers, "FLOAT_BYTES", 16)


CAN_CAPTURE = Capabilities(can_capture=True)


def site_of(layout: Layout, pools: KvPools) -> AttentionSite:
    return AttentionSite(pools, group_layers((layout.layer,)), layout.dtype, CpuDevice())


def exact(pools: KvPools, batch: DeviceBatch) -> ForwardBatch:
    """A batch whose exact lengths the host knows, as without speculation."""
    lens = batch.len_bounds_cpu - batch.query_lens_cpu
    return ForwardBatch.init_new(batch, pools, ForwardOverrides(kv_lens_cpu=lens))


def assert_parity(layout: Layout, shape: str) -> None:
    query_lens, kv_lens = SHAPES[shape]
    batch = device_batch(query_lens, kv_lens)
    pools = layout.pools(len(query_lens))
    fill(pools, layout, batch)
    made = exact(pools, batch)
    got = attended(FlashInfer(FakeFlashInfer(), site_of(layout, pools)), layout, made)
    expected = attended(TorchReference(pools), layout, made)
    tolerance = TOLERANCES[layout.dtype]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("page_size", [1, 16, 24])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_equals_the_reference(shape: str, page_size: int) -> None:
    assert_parity(Layout(layer(), page_size), shape)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 5, 16])
@pytest.mark.parametrize("page_size", [1, 4])
def test_every_kind_of_layer_equals_the_reference(
    page_size: int, window: int | None, softcap: float | None, heads: tuple[int, int]
) -> None:
    spec = layer(heads=heads, window=window, softcap=softcap)
    for shape in ("mixed", "decodes of all lengths"):
        assert_parity(Layout(spec, page_size), shape)


@pytest.mark.parametrize(("query_lens", "kv_lens"), [([3, 1], [0, 5]), ([1, 1], [6, 0])])
def test_kv_in_eight_bits_is_read_with_its_layers_scales(
    query_lens: list[int], kv_lens: list[int]
) -> None:
    spec = msgspec.structs.replace(layer(), kv_scales=(0.5, 4.0))
    pools = KvPools(
        group_layers((spec,)),
        (GroupSpec("full", 9),),
        page_size=4,
        table_shape=(3, 4),
        dtype=torch.float8_e4m3fn,
        device=CPU,
    )
    pools.page_tables[0][1:] = torch.arange(1, 9).view(2, 4)
    site = AttentionSite(pools, group_layers((spec,)), torch.float64, CpuDevice())
    made = exact(pools, device_batch(query_lens, kv_lens))
    qkv = random(torch.Generator().manual_seed(3), made.num_tokens, 8, HEAD_DIM)
    package = FakeFlashInfer()
    backend, reference = FlashInfer(package, site), TorchReference(pools)
    got = backend.bind(made, backend.plan(made))(spec, AttentionInputs(qkv))
    expected = reference.bind(made, None)(spec, AttentionInputs(qkv))
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    (plan,) = package.plans
    assert (plan.q_dtype, plan.kv_dtype) == (torch.float64, torch.float8_e4m3fn)


def test_pages_before_the_window_are_not_listed() -> None:
    """Such pages may belong to other rows; a kernel that reads them would read their NaN."""
    layout = Layout(layer(window=5), page_size=4)
    batch = device_batch([1, 2], [30, 17])
    pools = layout.pools(2)
    fill(pools, layout, batch)
    module = FakeFlashInfer()
    backend = FlashInfer(module, site_of(layout, pools))
    made = exact(pools, batch)
    backend.bind(made, backend.plan(made))
    table = pools.page_tables[1]
    # The token at 30 sees 26 to 30, those at 17 and 18 see 13 to 18.
    assert module.plans[0].pages.tolist() == [*table[1, 6:8].tolist(), *table[2, 3:5].tolist()]


def test_decodes_and_other_steps_have_wrappers_of_their_own() -> None:
    layout = Layout(layer(heads=(8, 2)))
    pools = layout.pools(2)
    module = FakeFlashInfer()
    backend = FlashInfer(module, site_of(layout, pools))
    backend.plan(exact(pools, device_batch([1, 1], [3, 4])))
    backend.plan(exact(pools, device_batch([1, 2], [3, 4])))
    decode, prefill = module.wrappers
    assert isinstance(decode, FakeDecode)
    assert isinstance(prefill, FakePrefill)
    assert decode.use_tensor_cores


@pytest.mark.parametrize(
    ("query_lens", "prefix_lens", "queries"),
    [
        ([1, 1], [4000, 0], Queries.DECODE),
        ([8192], [0], Queries.FULL_TILES),
        ([100, 300], [0, 0], Queries.FULL_TILES),
        ([2], [0], Queries.PARTIAL_TILES),
        ([500] + [1] * 255, [0] + [1000] * 255, Queries.PARTIAL_TILES),
        (
            [8192, 1],
            [0, 4000],
            Queries.FULL_TILES,
        ),  # the decode's tiles are few beside the prompt's
        (
            [2000, 1],
            [0, 130_000],
            Queries.PARTIAL_TILES,
        ),  # one row's keys, read for each head in one part
    ],
)
def test_rows_that_leave_tiles_empty_differ_from_prompts(
    query_lens: list[int], prefix_lens: list[int], queries: Queries
) -> None:
    own = np.array(query_lens, np.int32)
    assert queries_of(own, own + np.array(prefix_lens, np.int32)) is queries


def test_decodes_beside_a_prompt_run_where_heads_share_keys_and_long_rows_are_cut() -> None:
    """The kernels that the package chooses by default on Hopper do neither."""
    layout = Layout(layer())
    pools = layout.pools(2)
    module = FakeFlashInfer()
    backend = FlashInfer(module, site_of(layout, pools))
    for query_lens, kv_lens in (([1, 1], [3, 4]), ([1, 2], [3, 4]), ([8], [0]), ([70], [0])):
        backend.plan(exact(pools, device_batch(query_lens, kv_lens)))
    assert [wrapper.backend for wrapper in module.wrappers] == ["fa2", "fa2", "fa2", "auto"]


def test_few_heads_that_share_keys_decode_without_tensor_cores() -> None:
    layout = Layout(layer(heads=(4, 2)))
    module = FakeFlashInfer()
    pools = layout.pools(1)
    FlashInfer(module, site_of(layout, pools)).plan(exact(pools, device_batch([1], [3])))
    (decode,) = module.wrappers
    assert isinstance(decode, FakeDecode)
    assert not decode.use_tensor_cores


def test_layers_that_are_alike_share_a_plan_and_others_have_their_own() -> None:
    module = FakeFlashInfer()
    windows = (None, 6, None, 6)
    layers = tuple(
        msgspec.structs.replace(layer(window=window), index=i) for i, window in enumerate(windows)
    )
    pools = KvPools(
        group_layers(layers),
        (GroupSpec("full", 9), GroupSpec("window-6", 9, 6)),
        page_size=4,
        table_shape=(3, 4),
        dtype=torch.float64,
        device=CPU,
    )
    site = AttentionSite(pools, group_layers(layers), torch.float64, CpuDevice())
    FlashInfer(module, site).plan(exact(pools, device_batch([2, 1], [0, 4])))
    assert [plan.window_left for plan in module.plans] == [-1, 5]


def test_a_plan_in_flight_keeps_its_arrays_while_the_next_is_made() -> None:
    """The device reads pinned memory late; with two steps in flight it may have read neither."""
    layout = Layout(layer(), page_size=4)
    first, second = device_batch([3, 1], [9, 4]), device_batch([1, 5], [2, 0])
    pools = layout.pools(2)
    fill(pools, layout, first)
    backend = FlashInfer(FakeFlashInfer(), site_of(layout, pools))
    made = exact(pools, first)
    expected = attended(TorchReference(pools), layout, made)
    plan = backend.plan(made)
    backend.plan(exact(pools, second))
    backend.plan(exact(pools, second))
    torch.testing.assert_close(attended(Planned(backend, plan), layout, made), expected)


def test_memory_of_a_plan_is_written_again_only_after_its_event() -> None:
    layout = Layout(layer())
    pools = layout.pools(1)
    device = MarkedDevice()
    site = AttentionSite(pools, group_layers((layout.layer,)), layout.dtype, device, 3)
    backend = FlashInfer(FakeFlashInfer(), site)
    for _ in range(3):
        backend.plan(exact(pools, device_batch([1], [3])))
    assert device.waited == []
    backend.plan(exact(pools, device_batch([1], [3])))
    backend.plan(exact(pools, device_batch([1], [3])))
    assert device.waited == [0, 1]


def test_lengths_that_are_only_bounds_are_not_planned() -> None:
    layout = Layout(layer())
    pools = layout.pools(1)
    backend = FlashInfer(FakeFlashInfer(), site_of(layout, pools))
    assert KIND.capabilities.host_lens
    with pytest.raises(BugError, match="step 9: FlashInfer plans from exact lengths only"):
        backend.plan(ForwardBatch.init_new(device_batch([1], [3]), pools))


def test_a_plan_of_another_backend_is_refused() -> None:
    layout = Layout(layer())
    pools = layout.pools(1)
    backend = FlashInfer(FakeFlashInfer(), site_of(layout, pools))
    with pytest.raises(BugError, match="plan of another backend"):
        backend.bind(exact(pools, device_batch([1], [0])), None)


def test_its_kernels_are_compiled_before_it_is_chosen() -> None:
    """This compiles the kernels, on the padding row: two prefills, a decode, and a cascade."""
    layout = Layout(layer())
    pools = layout.pools(1)
    module = FakeFlashInfer()
    before = pools.layers[0].keys[layout.page_size :].clone()
    build_flashinfer(module, site_of(layout, pools))
    is_decode = [plan.cu_query_lens is None for plan in module.plans]
    assert is_decode == [False, False, True, False, False]
    assert [plan.causal for plan in module.plans] == [True, True, True, False, True]
    assert [wrapper.backend for wrapper in module.wrappers] == ["auto", *["fa2"] * 4]
    torch.testing.assert_close(
        pools.layers[0].keys[layout.page_size :], before, rtol=0, atol=0, equal_nan=True
    )


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

    layout = Layout(layer())
    told = f"compiled or run: {type(error).__name__}: {str(error).splitlines()[0]}"
    with pytest.raises(AttentionUnavailable, match=re.escape(told)):
        build_flashinfer(Broken(), site_of(layout, layout.pools(1)))


def test_queries_that_lie_beside_keys_are_read_where_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A copy would be one more launch per layer, of about a dozen."""
    layout = Layout(layer())
    pools = layout.pools(2)
    read: list[int] = []
    run = FakeDecode.run

    def running(
        wrapper: FakeDecode, q: Tensor, *pages: tuple[Tensor, Tensor], **more: Any
    ) -> Tensor:
        read.append(q.data_ptr())
        return run(wrapper, q, *pages, **more)

    monkeypatch.setattr(FakeDecode, "run", running)
    backend = FlashInfer(FakeFlashInfer(), site_of(layout, pools))
    made = exact(pools, device_batch([1, 1], [3, 4]))
    heads = torch.zeros((2, 8, HEAD_DIM), dtype=layout.dtype)
    backend.bind(made, backend.plan(made))(layout.layer, AttentionInputs(heads))
    assert read == [heads.data_ptr()]


@pytest.mark.parametrize("version", ["0.5.3", "0.2.9.post1"])
def test_an_older_version_is_unavailable(version: str) -> None:
    layout = Layout(layer())
    with pytest.raises(AttentionUnavailable, match=rf"has version {version}, but needs 0.6"):
        build_flashinfer(FakeFlashInfer(__version__=version), site_of(layout, layout.pools(1)))


@pytest.mark.parametrize("version", ["0.6.0", "0.7.2.post1", "1.0"])
def test_a_newer_version_is_taken(version: str) -> None:
    layout = Layout(layer())
    build_flashinfer(FakeFlashInfer(__version__=version), site_of(layout, layout.pools(1)))


def test_a_machine_without_it_says_so() -> None:
    with pytest.raises(AttentionUnavailable, match="cannot be imported: No module named"):
        registry._load("flashinfer")


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_engine_with_it_gives_the_plain_engines_tokens(
    monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    """Chunks, mixed steps and decodes, each forward planned exactly once for each group."""
    module = FakeFlashInfer()
    register(monkeypatch, module)
    model = HashModel(window=6)
    executor = make_executor(
        model, attention="flashinfer", depth=depth, lead=depth, max_batched_tokens=16
    )
    del module.plans[:]
    requests = [
        request(f"r{i}", [i + j % 30 for j in range(length)]) for i, length in enumerate((5, 40, 9))
    ]
    served = serve(executor, requests, chaos=depth)
    for asked in requests:
        assert served.outputs[asked.request_id, 0] == plain_outputs(model, asked)
    groups = len({spec.window for spec in model.layers})
    assert len(module.plans) == groups * len(served.batches)


def test_speculation_makes_an_engine_take_another_backend(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With speculation the host knows only bounds of the lengths, and cannot plan from them."""
    package = FakeFlashInfer()
    capabilities = Capabilities(host_lens=True)
    kinds = {
        "flashinfer": AttentionKind(capabilities, lambda site: build_flashinfer(package, site)),
        "paged-sdpa": BACKENDS["paged-sdpa"](),
    }
    found = {name: (lambda kind=kind: kind) for name, kind in kinds.items()}
    monkeypatch.setattr(registry, "BACKENDS", found)
    device = CpuDevice()
    device.attention = ("flashinfer", "paged-sdpa")
    model = HashModel()
    assert "attention flashinfer (auto)" in make_executor(model, device=device).about
    executor = make_executor(model, device=device, mode=TwoTokens())
    assert "attention paged-sdpa (auto, without flashinfer)" in executor.about
    assert "lengths that the host does not know yet" in caplog.text


# ---------------------------------------------------------------- captured forwards


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("window", [None, 5])
def test_a_replay_is_planned_anew_for_other_rows_and_lengths(
    window: int | None, width: int
) -> None:
    """Fewer rows than were captured are padded; nothing but buffers changes between replays."""
    layout = Layout(layer(window=window), page_size=4)
    replays = Replays(layout, StaticShape(4, width, 40), FakeFlashInfer())
    for kv_lens in ([0, 3, 7, 20], [30, 1], [5], [9, 9, 9, 36]):
        replays.set(kv_lens)
        torch.testing.assert_close(replays.replay(), replays.expected(), rtol=1e-12, atol=1e-12)


def test_wrappers_of_a_captured_forward_share_what_is_on_the_device_only() -> None:
    layout = Layout(layer(), page_size=4)
    package = FakeFlashInfer()
    replays = Replays(layout, StaticShape(2, 1, 40), package)
    for _ in range(2):
        replays.replay()
    assert len({id(wrapper.planned) for wrapper in package.wrappers}) == 3
    for name in ("starts", "pages", "last_lens"):
        assert len({getattr(wrapper.static, name).data_ptr() for wrapper in package.wrappers}) == 1
    assert len({id(wrapper.int_workspace) for wrapper in package.wrappers}) == 1
    assert all(len(plan.pages) == 0 for plan in package.plans)  # nothing to copy: it writes them


def test_a_refresh_writes_host_memory_again_only_after_its_event() -> None:
    layout = Layout(layer())
    pools = layout.pools(2)
    device = MarkedDevice()
    site = AttentionSite(pools, group_layers((layout.layer,)), layout.dtype, device, 3)
    backend = FlashInfer(FakeFlashInfer(), site)
    plan = backend.static_plans.make(StaticShape(2, 1, 40))
    last = device.num_marks - 1
    del device.waited[:]
    for _ in range(2):
        backend.static_plans.refresh(plan, np.array([3, 1], np.int32))
    assert device.waited == []
    backend.static_plans.refresh(plan, np.array([4, 1], np.int32))
    assert device.waited == [last]


def test_forwards_of_one_shape_share_a_plan() -> None:
    layout = Layout(layer())
    plans = FlashInfer(FakeFlashInfer(), site_of(layout, layout.pools(1))).static_plans
    shape, other = StaticShape(2, 1, 40), StaticShape(4, 1, 40)
    assert plans.make(shape) is plans.make(shape)
    assert plans.make(other) is not plans.make(shape)


@pytest.mark.parametrize("depth", [1, 2])
def test_an_engine_replays_with_it_planning_each_step_once(
    monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    """Decodes are padded and replayed, other steps run eagerly. Each of two groups has a plan."""
    package = FakeFlashInfer()
    register(monkeypatch, package, ops=LISTED_IN_TORCH)
    model, device = HashModel(window=6), GraphDevice()
    executor = make_executor(
        model,
        attention="flashinfer",
        device=device,
        graph_rows=4,
        depth=depth,
        lead=depth,
        max_batched_tokens=16,
    )
    executor.capture_graphs(lambda _done, _total: None)
    before = package.num_plans
    prompts = ([i + j % 30 for j in range(length)] for i, length in enumerate((5, 40, 9)))
    asked = [request(f"r{i}", prompt, max_tokens=12) for i, prompt in enumerate(prompts)]
    served = serve(executor, asked)
    assert served.outputs == {(r.request_id, 0): plain_outputs(model, r) for r in asked}
    assert device.num_replays > 10
    assert package.num_plans - before == 2 * len(served.batches)


@pytest.mark.parametrize("seed", [None, 1, 2])
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


def test_only_its_own_plans_are_refreshed() -> None:
    layout = Layout(layer())
    backend = FlashInfer(FakeFlashInfer(), site_of(layout, layout.pools(1)))
    with pytest.raises(BugError, match="of another backend"):
        backend.static_plans.refresh(None, np.array([1], np.int32))


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


class Planned:
    """A backend with a plan that was made earlier."""

    static_plans = None

    def __init__(self, backend: FlashInfer, plan: object) -> None:
        self._plan = plan
        self.bind = backend.bind

    def plan(self, batch: ForwardBatch) -> object:
        return self._plan


class MarkedDevice(CpuDevice):
    """Records in `waited` the numbers of the events that the host waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.waited: list[int] = []
        self.num_marks = 0

    def mark(self) -> MarkedEvent:
        self.num_marks += 1
        return MarkedEvent(self.waited, self.num_marks - 1)


class MarkedEvent:
    def __init__(self, waited: list[int], number: int) -> None:
        self._waited = waited
        self._number = number

    def synchronize(self) -> None:
        self._waited.append(self._number)


class Replays:
    """A captured forward of one shape and one layer, with fixed buffers."""

    def __init__(self, layout: Layout, shape: StaticShape, package: FakeFlashInfer) -> None:
        self.layout, self.shape = layout, shape
        self.pools = layout.pools(shape.num_rows)
        self.backend = FlashInfer(package, site_of(layout, self.pools), ops=LISTED_IN_TORCH)
        self.plan = self.backend.static_plans.make(shape)
        self.rows = torch.zeros(shape.num_rows, dtype=torch.int64)
        self.lens = torch.ones(shape.num_rows, dtype=torch.int64) * shape.width
        heads = layout.layer.num_heads + 2 * layout.layer.num_kv_heads
        num_tokens = shape.num_rows * shape.width
        self.qkv = torch.zeros((num_tokens, heads, HEAD_DIM), dtype=layout.dtype)
        self.captured = record(self._body)

    def host_lens(self) -> ArrayI32:
        return self.lens.numpy().astype(np.int32)

    def set(self, kv_lens: list[int]) -> None:
        """Rows 1, 2, ..., then padding; the pages and histories of `fill`."""
        width = self.shape.width
        batch = device_batch([width] * len(kv_lens), kv_lens)
        fill(self.pools, self.layout, batch)
        self.rows.zero_()[: len(kv_lens)] = batch.rows
        self.lens.fill_(width)[: len(kv_lens)] = batch.kv_lens + width
        self.qkv.copy_(random(torch.Generator().manual_seed(len(kv_lens)), *self.qkv.shape))

    def replay(self) -> Tensor:
        self.backend.static_plans.refresh(self.plan, self.host_lens())
        return self.captured.replay(lambda _: None).clone()

    def expected(self) -> Tensor:
        return self._attend(TorchReference(self.pools), None)

    def _body(self, _graph_break: GraphBreak) -> Tensor:
        return self._attend(self.backend, self.plan)

    def _attend(self, backend: AttentionBackend, plan: object) -> Tensor:
        batch = self._batch()
        return backend.bind(batch, plan)(self.layout.layer, AttentionInputs(self.qkv))

    def _batch(self) -> ForwardBatch:
        width, num_rows = self.shape.width, self.shape.num_rows
        token_to_row = torch.arange(num_rows).repeat_interleave(width, output_size=num_rows * width)
        query_lens_cpu = np.full(num_rows, width, np.int32)
        batch = DeviceBatch(
            iteration=9,
            rows=self.rows,
            query_lens=torch.full_like(self.rows, width),
            kv_lens=self.lens - width,
            input_ids=token_to_row,
            token_to_row=token_to_row,
            offsets=torch.arange(width).repeat(num_rows),
            query_lens_cpu=query_lens_cpu,
            len_bounds_cpu=self.host_lens(),
        )
        return ForwardBatch.init_new(batch, self.pools)
