"""Models on MLX against transformers and against torch's executor, through the whole engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aserve.gpu.build import BuildOptions
from aserve.gpu.mlx.build import build_mlx_executor
from aserve.messages.base import array_f32
from tests.gpu.drive import request, serve
from tests.parity.conftest import ReferenceOf
from tests.parity.real_model import Ask, Tokens, all_at_once, asks, engine
from tests.parity.references import MAX_MODEL_LEN, NUM_GREEDY, PROMPT_LEN

pytestmark = pytest.mark.slow

# Each shows something that the others do not have.
KINDS = (
    *("llama-biased", "llama-longrope", "llama-tied", "qwen2-sliding", "qwen3-mixed"),
    *("gemma2", "gemma3-linear", "granite", "olmo2", "phi3-partial", "smollm3"),
    *("exaone4-sliding", "glm4", "olmo3-yarn"),
)


@pytest.mark.parametrize("kind", KINDS)
def test_scores_and_greedy_tokens_are_those_of_transformers(
    kind: str, reference_of: ReferenceOf
) -> None:
    """Half the tokens come from another request's pages, and the rest in chunks."""
    reference = reference_of(kind)
    executor = build_mlx_executor(
        BuildOptions(
            reference.directory,
            dtype="float32",
            max_model_len=MAX_MODEL_LEN,
            num_pages=64,
            page_size=4,
            max_batched_tokens=19,
        )
    )
    prompt = [int(token) for token in reference.prompt]
    served = serve(
        executor,
        [
            request("scored", prompt, max_tokens=NUM_GREEDY, prompt_logprobs=0),
            request("beside", prompt[: PROMPT_LEN // 2], max_tokens=9),
        ],
    )
    assert served.outputs["scored", 0] == [int(token) for token in reference.greedy]
    found = np.concatenate([array_f32(part.chosen) for part in served.scores["scored", 0]])
    logprobs = reference.logits[: PROMPT_LEN - 1].log_softmax(dim=1)
    expected = logprobs.gather(1, reference.prompt[1:, None])[:, 0]
    assert found == pytest.approx(expected.numpy(), abs=1e-4)


async def outputs(asked: list[Ask], **options: Any) -> list[Tokens]:
    async with engine(dtype="float32", **options) as running:
        return await all_at_once(running, asked)


async def test_the_bundled_model_says_the_same_on_mlx_and_on_the_cpu() -> None:
    """16 requests, 12 of them at a temperature, with a prefix cache, chunks and retraction."""
    asked = asks()[:16]
    expected = await outputs(asked, device="cpu")
    paged = {"page_size": 1, "num_pages": 900, "max_num_batched_tokens": 48, "overlap_depth": 3}
    assert await outputs(asked, device="mlx", **paged) == expected
