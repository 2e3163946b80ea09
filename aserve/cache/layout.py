"""Sizes of KV pages in bytes, and the number of pages that each layer group gets."""

from __future__ import annotations

import bisect
import logging
from collections.abc import Sequence

import msgspec

from aserve.errors import BugError, ConfigError
from aserve.messages.base import MIB
from aserve.messages.executor import EngineSpec, GroupSpec

_TOKEN_ID_BYTES = 4  # int32
# Two steps in flight may each take a full token budget. At a larger depth a step may have to wait
# for pages.
_STEPS_IN_FLIGHT = 2

logger = logging.getLogger(__name__)


class GroupLayout(msgspec.Struct, frozen=True):
    """A layer group: layers that share a page table. The group without a window comes first, also
    if it has no layers, because the token ids of the sequences lie beside its slots.
    """

    name: str
    window: int | None
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int
    is_latent: bool = False  # one vector per KV head serves as key and value
    draft_bytes_per_token: int = 0  # keys and values of a drafter's layers with the same window
    index_bytes_per_token: int = 0  # index keys of sparse attention

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values per token in all layers, without those of a drafter."""
        num_vectors = (1 if self.is_latent else 2) * self.num_kv_heads
        return self.num_layers * num_vectors * self.head_dim * self.dtype_bytes

    def bytes_per_page(self, page_size: int) -> int:
        """Bytes of a page: keys, values and index keys of all layers, and token ids in the first
        group."""
        token_ids = _TOKEN_ID_BYTES if self.window is None else 0
        beside = self.draft_bytes_per_token + self.index_bytes_per_token + token_ids
        return page_size * (self.bytes_per_token + beside)


def plan_groups(
    layouts: Sequence[GroupLayout],
    *,
    page_size: int,
    budget_bytes: int,
    max_rows: int,
    max_model_len: int,
    max_batched_tokens: int,
    num_pages: int | None,
) -> tuple[GroupSpec, ...]:
    """Returns each group's number of pages, page 0 included: enough for one request of
    max_model_len, then as many as fit into the budget, up to what max_rows such requests can use.
    A given `num_pages` is that of the group without a window. Raises ConfigError if one request, or
    the given pages, do not fit.
    """
    if not layouts or layouts[0].window is not None or None in [x.window for x in layouts[1:]]:
        raise BugError(f"the first layer group, and no other, must be without a window: {layouts}")
    needs = [
        _need(
            layout,
            page_size=page_size,
            max_rows=max_rows,
            max_model_len=max_model_len,
            max_batched_tokens=max_batched_tokens,
        )
        for layout in layouts
    ]
    if num_pages is not None:
        if num_pages < 2:
            raise ConfigError(
                f"--num-pages {num_pages} leaves no page to use: page 0 is padding; give 2 or more",
                param="num_pages",
            )
        counts = [num_pages, *(need.most for need in needs[1:])]
    else:
        costs = [layout.bytes_per_page(page_size) for layout in layouts]
        counts = _share(needs, costs, budget_bytes=budget_bytes, max_model_len=max_model_len)
    # For each page of a windowed group a row holds one of the full group, so more would be unused.
    groups = tuple(
        GroupSpec(name=layout.name, num_pages=min(count, counts[0]), window=layout.window)
        for layout, count in zip(layouts, counts, strict=True)
    )
    if num_pages is not None:
        _check_room(layouts, groups, page_size=page_size, budget_bytes=budget_bytes)
    return groups


def _check_room(
    layouts: Sequence[GroupLayout],
    groups: Sequence[GroupSpec],
    *,
    page_size: int,
    budget_bytes: int,
) -> None:
    """NOTE: a device's pool may become resident as it is written, so that it can be allocated
    though it does not fit."""
    size_bytes = sum(
        layout.bytes_per_page(page_size) * group.num_pages
        for layout, group in zip(layouts, groups, strict=True)
    )
    if size_bytes > budget_bytes:
        raise ConfigError(
            f"--num-pages {groups[0].num_pages} takes {size_bytes // MIB:,} MiB of KV memory, but "
            f"{budget_bytes // MIB:,} MiB are free; lower it or leave it out",
            param="num_pages",
        )


def longest_context(
    layouts: Sequence[GroupLayout],
    *,
    page_size: int,
    budget_bytes: int,
    max_model_len: int,
    max_batched_tokens: int,
) -> int:
    """Returns the longest context whose pages fit into the budget, at most max_model_len. If it is
    less, it is a multiple of the page size; it is 0 if not even one page fits.
    """

    def is_too_long(num_pages: int) -> bool:
        return budget_bytes < sum(
            layout.bytes_per_page(page_size)
            * _need(
                layout,
                page_size=page_size,
                max_rows=1,
                max_model_len=num_pages * page_size,
                max_batched_tokens=max_batched_tokens,
            ).least
            for layout in layouts
        )

    pages = range(1, -(-max_model_len // page_size) + 1)
    return min(bisect.bisect_left(pages, True, key=is_too_long) * page_size, max_model_len)


def with_pages(
    spec: EngineSpec,
    layouts: Sequence[GroupLayout],
    *,
    num_pages: int | None,
    budget_bytes: int,
    may_shorten: bool,
) -> EngineSpec:
    """Returns the spec with its groups. They have `num_pages`, or else what fits the budget; then
    the context may become shorter, if the user has not named one (`may_shorten`).
    """
    if num_pages is None and may_shorten:
        max_model_len = _context_with_room(spec, layouts, budget_bytes)
        spec = msgspec.structs.replace(spec, max_model_len=max_model_len)
    groups = plan_groups(
        layouts,
        page_size=spec.page_size,
        budget_bytes=budget_bytes,
        max_rows=spec.max_rows,
        max_model_len=spec.max_model_len,
        max_batched_tokens=spec.max_batched_tokens,
        num_pages=num_pages,
    )
    return msgspec.structs.replace(spec, groups=groups)


def _context_with_room(spec: EngineSpec, layouts: Sequence[GroupLayout], budget_bytes: int) -> int:
    """Returns the model's context length, or what one request has KV memory for if that is less."""
    room = longest_context(
        layouts,
        page_size=spec.page_size,
        budget_bytes=budget_bytes,
        max_model_len=spec.max_model_len,
        max_batched_tokens=spec.max_batched_tokens,
    )
    if room in (0, spec.max_model_len):
        return spec.max_model_len  # with no room at all, plan_groups reports what is missing
    logger.warning(
        "the context is %d tokens instead of the model's %d: KV memory is %d MiB; "
        "--num-pages gives more",
        *(room, spec.max_model_len, budget_bytes // MIB),
    )
    return room


class _Need(msgspec.Struct, frozen=True):
    """Pages of a group, page 0 included: for one request, and for all rows together."""

    least: int
    most: int


def _need(
    layout: GroupLayout,
    *,
    page_size: int,
    max_rows: int,
    max_model_len: int,
    max_batched_tokens: int,
) -> _Need:
    whole = -(-max_model_len // page_size)
    if layout.window is None:
        return _Need(least=whole + 1, most=max_rows * whole + 1)
    # A row holds its window, a page at each end that is partly inside, and its tokens in flight.
    per_row = -(-layout.window // page_size) + 2
    alone = per_row + -(-max_batched_tokens // page_size)
    together = max_rows * per_row + -(-_STEPS_IN_FLIGHT * max_batched_tokens // page_size)
    return _Need(least=min(whole, alone) + 1, most=min(max_rows * whole, together) + 1)


def _share(
    needs: Sequence[_Need], costs: Sequence[int], *, budget_bytes: int, max_model_len: int
) -> list[int]:
    """Gives each group its least. Of the rest, windowed groups get what they can use, but at most
    half if the full group can use the other half.
    """
    floor = sum(need.least * cost for need, cost in zip(needs, costs, strict=True))
    spare = budget_bytes - floor
    if spare < 0:
        raise ConfigError(
            f"one request of max_model_len {max_model_len} needs {floor} bytes of KV memory "
            f"({' + '.join(str(need.least) for need in needs)} pages), but the budget is "
            f"{budget_bytes} bytes: choose a smaller --max-model-len or give more memory",
            param="max_model_len",
        )
    wanted = [(need.most - need.least) * cost for need, cost in zip(needs, costs, strict=True)]
    windowed_wanted = sum(wanted[1:])
    windowed = min(windowed_wanted, max(spare // 2, spare - wanted[0]))
    counts = [need.least for need in needs]
    for group in range(1, len(needs)):
        if windowed_wanted:
            extra = needs[group].most - needs[group].least
            counts[group] += extra * windowed // windowed_wanted
    counts[0] += min(spare - windowed, wanted[0]) // costs[0]
    return counts


def first_visible_page(kv_len: int, *, window: int | None, page_size: int) -> int:
    """Returns the first page index that the query at position `kv_len` sees."""
    if window is None:
        return 0
    return max(kv_len - window + 1, 0) // page_size
