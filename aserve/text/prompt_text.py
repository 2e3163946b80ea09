"""Returns a prompt to the client: its text for `echo`, and its tokens with their logprobs."""

from __future__ import annotations

from itertools import accumulate

from aserve.messages.base import array_f32, array_i32
from aserve.messages.requests import OpenText, SamplingParams
from aserve.messages.results import PromptLogprobs
from aserve.messages.scored import PromptPart, PromptToken, TopLogprob, join_parts
from aserve.text.logprobs import alternatives, display_text
from aserve.text.tokenizer import TextTokenizer


def prompt_texts(
    prompt_ids: list[int], sampling: SamplingParams, tokenizer: TextTokenizer
) -> tuple[str, ...]:
    """Returns the text that each token adds to the prompt's text."""
    stream = tokenizer.stream(skip_special=sampling.skip_special_tokens)
    texts = [stream.feed(token_id) for token_id in prompt_ids]
    texts[-1] += stream.finish()
    return tuple(texts)


class PromptText:
    """The prompt of one request, which becomes known in parts. All children share it, so each
    child counts the parts that it has sent.

    Without logprobs the first part is the whole prompt. With logprobs it is token 0, which nothing
    predicts, and `feed` adds the others in order.
    """

    __slots__ = ("_echoed", "_ids", "_num_known", "_num_top", "_offsets", "_tokenizer", "parts")

    def __init__(self, opened: OpenText, tokenizer: TextTokenizer) -> None:
        sampling = opened.sampling
        self._tokenizer = tokenizer
        self._ids: list[int] = array_i32(opened.prompt_ids).tolist()
        self._num_top = sampling.prompt_logprobs
        self._offsets = list(accumulate(map(len, opened.prompt_texts), initial=0))
        self._echoed = opened.prompt_texts if sampling.echo else ()
        self._num_known = 0  # tokens in the parts
        self.parts: list[PromptPart] = []
        if self._num_top is None:
            self._add(len(opened.prompt_texts), ())
        else:
            self._add(1, (self._token(0),))

    @property
    def is_whole(self) -> bool:
        return self._num_known == len(self._offsets) - 1

    @property
    def text_len(self) -> int:
        """The number of characters before the output."""
        return self._offsets[-1] if self._echoed else 0

    def skip(self) -> None:
        """Drops all parts, because they were already sent."""
        self.parts.clear()
        self._num_known = len(self._offsets) - 1

    def feed(self, scores: PromptLogprobs) -> None:
        assert scores.position == self._num_known, "logprobs arrive once and in order"
        assert self._num_top is not None
        chosen = array_f32(scores.chosen).tolist()
        tops = alternatives(
            scores.top_ids,
            scores.top_logprobs,
            num_tokens=len(chosen),
            num_top=self._num_top,
            tokenizer=self._tokenizer,
        )
        tokens = tuple(
            self._token(position, logprob=logprob, rank=rank, top=top)
            for position, (logprob, rank, top) in enumerate(
                zip(chosen, array_i32(scores.ranks).tolist(), tops, strict=True),
                start=scores.position,
            )
        )
        self._add(len(tokens), tokens)

    def since(self, num_parts: int) -> PromptPart | None:
        """Joins the parts from number `num_parts` on. Returns None if there are none."""
        return join_parts(self.parts[num_parts:])

    def _add(self, num_tokens: int, tokens: tuple[PromptToken, ...]) -> None:
        start, self._num_known = self._num_known, self._num_known + num_tokens
        self.parts.append(PromptPart("".join(self._echoed[start : self._num_known]), tokens))

    def _token(
        self,
        position: int,
        *,
        logprob: float | None = None,
        rank: int | None = None,
        top: tuple[TopLogprob, ...] = (),
    ) -> PromptToken:
        token_id = self._ids[position]
        token_bytes = self._tokenizer.token_bytes(token_id)
        return PromptToken(
            token_id=token_id,
            token=display_text(token_bytes),
            token_bytes=token_bytes,
            text_offset=self._offsets[position],
            logprob=logprob,
            rank=rank,
            top=top,
        )
