import pytest

from aserve.cache.windows import first_visible_page


@pytest.mark.parametrize("page_size", [1, 3, 4])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 7])
def test_a_page_is_visible_exactly_if_one_of_its_positions_is(page_size: int, window: int) -> None:
    for kv_len in range(30):
        seen = {p // page_size for p in range(max(kv_len - window + 1, 0), kv_len + 1)}
        first = first_visible_page(kv_len, window=window, page_size=page_size)
        assert first == min(seen)


def test_without_a_window_everything_stays_visible() -> None:
    assert first_visible_page(1000, window=None, page_size=4) == 0
