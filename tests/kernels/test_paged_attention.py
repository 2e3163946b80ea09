"""Both attention ops in Triton's interpreter, against plain torch."""

from __future__ import annotations

import itertools

import pytest
import torch

from aserve_kernels.paged_rows import Scoring
from aserve_kernels.paged_tiles import KvSplits
from tests.kernels.paged_case import OPS, Case, assert_equals_reference, make_inputs, run

SHAPES = {
    "no row": (),
    "one token": ((1, 1),),
    "a page's last slot": ((1, 16),),
    "a page's first slot": ((1, 17),),
    "decodes of all lengths": ((1, 1), (1, 31), (1, 64), (1, 65), (1, 200), (1, 3)),
    "a whole tile": ((64, 64),),
    "a tile and one": ((65, 65),),
    "chunks that end in one block": ((3, 40), (2, 2), (33, 33), (70, 100)),
    "decodes beside chunks": ((1, 70), (40, 40), (1, 1), (5, 90), (1, 129)),
}
MIXED = SHAPES["decodes beside chunks"]
FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("rows", SHAPES.values(), ids=SHAPES)
def test_every_shape_equals_the_reference(rows: tuple[tuple[int, int], ...]) -> None:
    assert_equals_reference(Case(rows))


@pytest.mark.parametrize("head_dim", [8, 64, 96, 256])
def test_heads_of_every_width_equal_the_reference(head_dim: int) -> None:
    assert_equals_reference(Case(((1, 70), (5, 69)), head_dim=head_dim, scoring=Scoring(0.1)))


@pytest.mark.parametrize("heads", [(2, 2), (7, 1), (40, 2)])
def test_grouped_queries_of_every_size_equal_the_reference(heads: tuple[int, int]) -> None:
    assert_equals_reference(Case(((1, 70), (1, 1), (5, 90)), heads=heads))


@pytest.mark.parametrize(
    ("window", "softcap"), [(1, None), (5, 2.0), (64, None), (65, 2.0), (100, None), (None, 1.5)]
)
def test_windows_and_caps_equal_the_reference(window: int | None, softcap: float | None) -> None:
    scoring = Scoring(0.3 if window else 3.0, window=window, softcap=softcap)
    assert_equals_reference(Case(((1, 70), (1, 129), (70, 200)), scoring=scoring))


@pytest.mark.parametrize(
    ("window", "page_size", "splits"),
    [
        (None, 16, KvSplits()),
        (1, 16, KvSplits()),
        (20, 1, KvSplits()),
        (100, 64, KvSplits()),
        (100, 16, KvSplits(fixed_split=64)),
    ],
)
@pytest.mark.parametrize("has_trees", [False, True])
def test_queries_that_see_keys_behind_them_or_only_their_branch_equal_the_reference(
    window: int | None, page_size: int, splits: KvSplits, *, has_trees: bool
) -> None:
    """Behind prefixes of nothing, of whole tiles, of all but the last key of one and of parts of
    one; in one block of queries and in several."""
    scoring = Scoring(0.3, window=window, is_causal=has_trees)
    rows = ((1, 70), (5, 5), (16, 79), (2, 130), (170, 231))
    assert_equals_reference(
        Case(
            rows,
            heads=(2, 1),
            page_size=page_size,
            scoring=scoring,
            splits=splits,
            has_trees=has_trees,
            max_len=256,
        )
    )


@pytest.mark.parametrize("fixed_split", [None, 64])
def test_sinks_join_the_softmax(fixed_split: int | None) -> None:
    """A sink below all scores, sinks among them, and one so far above that nothing else is left."""
    scoring = Scoring(0.3, window=100, sinks=torch.tensor([-60.0, 0.0, 2.0, 300.0]))
    splits = KvSplits(fixed_split=fixed_split)
    case = Case(((1, 70), (40, 40), (1, 129)), scoring=scoring, splits=splits)
    assert_equals_reference(case)


@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_equals_the_reference(dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    scoring = Scoring(0.3, window=100, key_scale=0.5, value_scale=2.0)
    rows = ((1, 70), (40, 40), (1, 129))
    assert_equals_reference(Case(rows, dtype=dtype, kv_dtype=kv_dtype, scoring=scoring))


@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize(
    "splits",
    [KvSplits(min_split=64, max_splits=2), KvSplits(min_split=64), KvSplits(fixed_split=64)],
    ids=["grown", "least", "fixed"],
)
def test_however_keys_are_split_they_are_all_attended_to(
    splits: KvSplits, window: int | None
) -> None:
    rows, scoring = ((1, 65), (1, 300), (20, 150)), Scoring(0.3, window=window)
    assert_equals_reference(Case(rows, splits=splits, scoring=scoring, max_len=640))


@pytest.mark.parametrize("window", [None, 100])
def test_a_row_is_bitwise_the_same_alone_and_among_others(window: int | None) -> None:
    """Its parts depend on its own length, while the grid depends on how many rows there are."""
    rows = ((1, 300), (1, 5), (30, 90), (2, 180))
    scoring = Scoring(0.3, window=window)
    together = Case(rows, scoring=scoring, splits=KvSplits(min_split=64), max_len=300)
    given = make_inputs(together)
    every = run(OPS, given, together)
    starts = given.paged.cu_query_lens.tolist()
    for row, part in enumerate(itertools.starmap(slice, itertools.pairwise(starts))):
        assert torch.equal(run(OPS, given.alone(row, part), together), every[part]), row


@pytest.mark.usefixtures("sums_in_one_order")
@pytest.mark.parametrize(("dtype", "window"), [(torch.float32, None), (torch.bfloat16, 100)])
def test_with_fixed_parts_a_query_is_bitwise_the_same_in_any_step(
    dtype: torch.dtype, window: int | None
) -> None:
    """Each token of a prompt, in chunks that end anywhere, and the last ones by themselves."""
    scoring, splits = Scoring(0.3, window=window), KvSplits(fixed_split=64)
    prompt = Case(((150, 150), (1, 40)), dtype=dtype, scoring=scoring, splits=splits, max_len=320)
    given = make_inputs(prompt)
    chunks = [
        run(OPS, given.alone(0, slice(start, end), end), prompt)
        for start, end in itertools.pairwise([0, 1, 64, 130, 149, 150])
    ]
    assert torch.equal(torch.cat(chunks), run(OPS, given, prompt)[:150])
