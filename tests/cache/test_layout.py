import pytest

from aserve.cache.layout import GroupLayout, first_visible_page, longest_context, plan_groups
from aserve.errors import BugError, ConfigError
from aserve.messages.executor import GroupSpec

FULL = GroupLayout("full", None, num_layers=2, num_kv_heads=2, head_dim=8, dtype_bytes=4)
WINDOWED = GroupLayout("window", 32, num_layers=6, num_kv_heads=1, head_dim=8, dtype_bytes=4)
TOKENS_ONLY = GroupLayout("tokens", None, num_layers=0, num_kv_heads=0, head_dim=0, dtype_bytes=4)


def plan(
    *layouts: GroupLayout,
    budget_bytes: int = 0,
    max_rows: int = 4,
    max_batched_tokens: int = 64,
    max_model_len: int = 1000,
    num_pages: int | None = None,
) -> tuple[GroupSpec, ...]:
    return plan_groups(
        layouts,
        page_size=16,
        budget_bytes=budget_bytes,
        max_rows=max_rows,
        max_model_len=max_model_len,
        max_batched_tokens=max_batched_tokens,
        num_pages=num_pages,
    )


def cost(layouts: tuple[GroupLayout, ...], groups: tuple[GroupSpec, ...]) -> int:
    return sum(
        layout.bytes_per_page(16) * group.num_pages
        for layout, group in zip(layouts, groups, strict=True)
    )


def test_one_request_of_the_longest_length_fits_or_the_numbers_are_told() -> None:
    page = FULL.bytes_per_page(16)  # 1000 tokens are 63 pages, and the padding page
    assert plan(FULL, budget_bytes=64 * page)[0].num_pages == 64
    with pytest.raises(
        ConfigError, match=rf"max_model_len 1000 needs {64 * page} .*--max-model-len"
    ):
        plan(FULL, budget_bytes=64 * page - 1)


@pytest.mark.parametrize("layouts", [(FULL,), (FULL, WINDOWED), (TOKENS_ONLY, WINDOWED)])
@pytest.mark.parametrize("budget_bytes", [30_000, 123_456, 400_000])
def test_the_longest_context_is_the_longest_that_can_be_planned(
    layouts: tuple[GroupLayout, ...], budget_bytes: int
) -> None:
    longest = longest_context(
        layouts,
        page_size=16,
        budget_bytes=budget_bytes,
        max_model_len=5000,
        max_batched_tokens=64,
    )
    if longest:
        plan(*layouts, budget_bytes=budget_bytes, max_model_len=longest)
    if longest < 5000:
        with pytest.raises(ConfigError, match="max_model_len"):
            plan(*layouts, budget_bytes=budget_bytes, max_model_len=longest + 1)


def test_a_large_budget_buys_only_what_the_rows_can_use() -> None:
    """For each row a window of 2 pages, one entered and one left, and two steps of 4 pages in
    flight. A model of windowed layers only keeps its token ids in a group without layers.
    """
    for full in (FULL, TOKENS_ONLY):
        groups = plan(full, WINDOWED, budget_bytes=10**12)
        assert [group.num_pages for group in groups] == [4 * 63 + 1, 4 * 4 + 8 + 1]
        assert [group.window for group in groups] == [None, 32]


@pytest.mark.parametrize("max_rows", [1, 4, 64])
@pytest.mark.parametrize("max_batched_tokens", [1, 64, 4096])
@pytest.mark.parametrize("budget_pages", [160, 1000, 10_000])
def test_every_plan_stays_in_its_budget_and_serves_one_request(
    max_rows: int, max_batched_tokens: int, budget_pages: int
) -> None:
    layouts = (FULL, WINDOWED)
    budget = budget_pages * FULL.bytes_per_page(16)
    groups = plan(
        *layouts, budget_bytes=budget, max_rows=max_rows, max_batched_tokens=max_batched_tokens
    )
    assert cost(layouts, groups) <= budget
    assert groups[0].num_pages >= 64
    # The window and one chunk, or the whole request where that is less; and the padding page.
    assert groups[1].num_pages >= min(63, 4 + -(-max_batched_tokens // 16)) + 1
    assert groups[1].num_pages <= groups[0].num_pages


def test_a_scarce_budget_leaves_half_of_what_is_to_spare_for_the_full_group() -> None:
    layouts = (FULL, WINDOWED)
    least = plan(*layouts, budget_bytes=10**12, max_rows=1)
    floor = cost(layouts, (least[0], GroupSpec(name="window", num_pages=9, window=32)))
    spare = 200 * FULL.bytes_per_page(16)
    groups = plan(*layouts, budget_bytes=floor + spare, max_rows=1000)
    assert groups[0].num_pages == 64 + 100
    assert cost(layouts, groups) > floor + spare - sum(x.bytes_per_page(16) for x in layouts)


def test_what_the_full_group_cannot_use_goes_to_the_windowed_groups() -> None:
    deep = GroupLayout("window", 320, num_layers=60, num_kv_heads=1, head_dim=8, dtype_bytes=4)
    most = plan(FULL, deep, budget_bytes=10**12)
    assert plan(FULL, deep, budget_bytes=cost((FULL, deep), most)) == most


def test_an_explicit_number_of_pages_wins_over_the_length() -> None:
    full, windowed = plan(FULL, WINDOWED, num_pages=10, budget_bytes=1 << 30)
    assert (full.num_pages, windowed.num_pages) == (10, 10)
    assert plan(FULL, num_pages=5000, budget_bytes=1 << 30)[0].num_pages == 5000
    with pytest.raises(ConfigError, match="--num-pages 1 leaves no page"):
        plan(FULL, num_pages=1)


def test_more_pages_than_memory_has_are_refused_before_they_are_allocated() -> None:
    layouts = FULL, WINDOWED
    room = cost(layouts, plan(*layouts, num_pages=5000, budget_bytes=1 << 30))
    assert plan(*layouts, num_pages=5000, budget_bytes=room)[0].num_pages == 5000
    with pytest.raises(ConfigError, match=r"--num-pages 5000 takes 19 MiB .* 19 MiB are free"):
        plan(*layouts, num_pages=5000, budget_bytes=room - 1)


@pytest.mark.parametrize("layouts", [(), (WINDOWED,), (WINDOWED, FULL), (FULL, TOKENS_ONLY)])
def test_the_group_without_a_window_is_the_first_and_the_only_one(
    layouts: tuple[GroupLayout, ...],
) -> None:
    with pytest.raises(BugError, match="must be without a window"):
        plan(*layouts, budget_bytes=10**9)


@pytest.mark.parametrize("page_size", [1, 3, 4])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 7])
def test_a_page_is_visible_exactly_if_one_of_its_positions_is(page_size: int, window: int) -> None:
    for kv_len in range(30):
        seen = {p // page_size for p in range(max(kv_len - window + 1, 0), kv_len + 1)}
        first = first_visible_page(kv_len, window=window, page_size=page_size)
        assert first == min(seen)
