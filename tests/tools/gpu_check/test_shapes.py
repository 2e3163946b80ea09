"""What a step reads and computes at least, and the load that others have published."""

from __future__ import annotations

from pathlib import Path

import pytest

from aserve.bench.roofline import count_parameters
from tools.gpu_check.published import draw_load
from tools.gpu_check.shapes import QWEN3_LARGE, QWEN3_SMALL, TINY_LARGE, TINY_SMALL, ModelShape


@pytest.mark.slow
@pytest.mark.parametrize("shape", [TINY_SMALL, TINY_LARGE], ids=lambda shape: shape.name)
def test_weights_are_counted_as_transformers_counts_them(shape: ModelShape, tmp_path: Path) -> None:
    counted = count_parameters(shape.write(tmp_path))
    assert counted.body == shape.body_weights + shape.norm_weights
    assert counted.head == shape.head_weights
    assert shape.step_bytes == 2 * (counted.body + counted.head)


def test_the_large_shapes_have_the_parameters_of_their_names() -> None:
    """0.596 billion with the tied table counted once; 8.19 billion with both tables."""
    small, large = QWEN3_SMALL, QWEN3_LARGE
    assert small.body_weights + small.norm_weights + small.head_weights == 596_049_920
    assert large.body_weights + large.norm_weights + 2 * large.head_weights == 8_190_735_360


def test_the_published_load_has_the_published_number_of_tokens() -> None:
    load = draw_load(256, shortest=100, longest=1024, vocab=QWEN3_SMALL.vocab)
    assert sum(num_new for _, num_new in load) == 133_966
    assert all(100 <= len(prompt) <= 1024 for prompt, _ in load)
