"""A model whose layers all have a window, behind the whole engine, in less memory than its context
would take.
"""

from __future__ import annotations

import pytest

from aserve.config import Resolved
from aserve.engine import Engine
from aserve.gpu.build import BuildOptions, build_executor
from aserve.load import Loaded
from aserve.messages.base import array_i32
from aserve.messages.step import ScheduleBatch
from aserve.text.load import TextSide
from tests.parity.conftest import ReferenceOf
from tests.parity.real_model import HookedRunner, calm
from tests.parity.references import MAX_MODEL_LEN, NUM_GREEDY, PROMPT_LEN, Reference
from tests.text.vocabularies import byte_level_tokenizer

pytestmark = pytest.mark.slow  # the reference takes a moment to make

PAGE_SIZE = 4
CHUNK_LEN = 8


class Loader:
    """Notes which pages of the windowed group each step took."""

    def __init__(self, reference: Reference, *, prefix_cache: bool) -> None:
        self.options = BuildOptions(
            reference.directory,
            page_size=PAGE_SIZE,
            max_rows=1,
            max_batched_tokens=CHUNK_LEN,
            max_model_len=MAX_MODEL_LEN,
            prefix_cache=prefix_cache,
            debug_checks=True,
        )
        self.taken: list[list[int]] = []
        self.num_pages = 0

    def __call__(self, resolved: Resolved) -> Loaded:
        executor = build_executor(self.options)
        full, windowed = executor.spec.groups
        assert (full.window, windowed.window) == (None, 24)
        self.num_pages = windowed.num_pages - 1  # page 0 is padding
        runner = HookedRunner(executor._runner, self._note, calm)
        executor._runner = runner  # type: ignore[assignment]  # it has all that a runner has
        return Loaded(executor, TextSide(byte_level_tokenizer()))

    def _note(self, batch: ScheduleBatch) -> None:
        self.taken.append([int(page) for page in array_i32(batch.page_writes[1].pages)])


@pytest.mark.parametrize("prefix_cache", [False, True])
async def test_pages_behind_the_window_come_back_while_a_long_prompt_runs(
    prefix_cache: bool, reference_of: ReferenceOf
) -> None:
    reference = reference_of("mistral")
    loader = Loader(reference, prefix_cache=prefix_cache)
    prompt = [int(token) for token in reference.prompt]
    async with Engine(loader=loader, codec=True, debug_checks=True) as running:
        loader.taken.clear()  # of the warm-up
        answers = [
            await running.answer(prompt, temperature=0, max_tokens=NUM_GREEDY, ignore_eos=True)
            for _ in range(2)
        ]
    for answer in answers:
        assert list(answer.choices[0].token_ids) == reference.greedy.tolist()
    num_chunks = -(-PROMPT_LEN // CHUNK_LEN)
    of_prompt = [page for step in loader.taken[:num_chunks] for page in step]
    assert len(of_prompt) == -(-PROMPT_LEN // PAGE_SIZE) > loader.num_pages
    assert len({*of_prompt}) <= loader.num_pages
