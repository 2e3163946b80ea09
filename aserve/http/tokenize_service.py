"""Answers /tokenize and /detokenize in a thread, without a request to the engine.

The number of waiting calls is bounded. frontend.py opens the service when a model is loaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from aserve.errors import EngineDead, QueueFull
from aserve.messages.requests import Prompt
from aserve.pictures.fetch import MediaFetcher
from aserve.text.prompt import PromptEncoder

T = TypeVar("T")

MAX_WAITING = 64
RETRY_AFTER_S = 1.0


class TokenizeService:
    """Runs one call after the other in its own thread, so that long texts delay neither the loop
    nor the prompts of requests.
    """

    def __init__(self) -> None:
        self._encoder: PromptEncoder | None = None
        self._media = MediaFetcher()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
        self._num_waiting = 0

    def open(self, encoder: PromptEncoder, media: MediaFetcher | None = None) -> None:
        """`media` belongs to the tokenizer actor, which closes it."""
        self._encoder = encoder
        self._media = media or MediaFetcher()

    def close(self) -> None:
        self._encoder = None
        self._thread.shutdown(wait=False, cancel_futures=True)

    @property
    def special_ids(self) -> frozenset[int]:
        """The special tokens, which texts leave out; none until the tokenizer is loaded."""
        return frozenset() if self._encoder is None else self._encoder.tokenizer.special_ids

    @property
    def takes_pictures(self) -> bool:
        """Whether the model reads pictures; False until it is loaded."""
        return self._encoder is not None and self._encoder.takes_pictures

    async def count(self, prompt: Prompt) -> int:
        """Returns the number of tokens of a prompt, those of its pictures included."""
        return await self.run_on(prompt, lambda encoder, whole: len(encoder.encode(whole)))

    async def run_on(self, prompt: Prompt, work: Callable[[PromptEncoder, Prompt], T]) -> T:
        """Like `run`, with a prompt whose pictures are fetched first."""
        async with self._media.fetched(prompt) as whole:
            return await self.run(lambda encoder: work(encoder, whole))

    async def run(self, work: Callable[[PromptEncoder], T]) -> T:
        """Runs `work` in the thread, in order of arrival. It is skipped if the caller is
        cancelled before it begins.
        """
        if self._encoder is None:
            raise EngineDead("no model is loaded, so there is no tokenizer")
        if self._num_waiting >= MAX_WAITING:
            raise QueueFull(
                f"{MAX_WAITING} texts already wait for the tokenizer; try again later",
                retry_after_s=RETRY_AFTER_S,
            )
        self._num_waiting += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, work, self._encoder)
        finally:
            self._num_waiting -= 1
