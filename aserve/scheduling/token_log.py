"""The tokens of one sequence, and the mask of its next one."""

from __future__ import annotations

from array import array

import msgspec

from aserve.messages.base import ArrayI32, array_i32
from aserve.messages.results import RowDrafts


class TokenLog:
    """The prompt and the committed outputs of a sequence, int32; `num` tokens. All children of a
    request share the prompt.
    """

    __slots__ = ("_prompt", "outputs")

    def __init__(self, prompt_ids: ArrayI32, outputs: bytes) -> None:
        self._prompt = prompt_ids
        self.outputs = array("i", outputs)

    @property
    def num(self) -> int:
        return len(self._prompt) + len(self.outputs)

    def span(self, start: int, stop: int) -> ArrayI32:
        """tokens[start:stop], cut at what is known."""
        return array_i32(self.packed(start, stop))

    def packed(self, start: int, stop: int) -> bytes:
        """Returns the same tokens as the bytes of an array."""
        num_prompt = len(self._prompt)
        if start >= num_prompt:
            return self.outputs[start - num_prompt : stop - num_prompt].tobytes()
        known = self._prompt[start:stop].tobytes()
        return known + self.outputs[: max(stop - num_prompt, 0)].tobytes()

    def at(self, position: int) -> int:
        num_prompt = len(self._prompt)
        if position < num_prompt:
            return int(self._prompt[position])
        return self.outputs[position - num_prompt]


class MaskState(msgspec.Struct, gc=False):
    """The mask of the next output, for a sequence with a host-side sampler."""

    asked: int = -1  # the output position of the last BuildMask
    drafts: RowDrafts | None = None  # after that output, of step `drafts_iteration`
    drafts_iteration: int = 0
    num_sent: int = 0  # outputs that BuildMasks have carried
    mask: bytes | None = None  # of output position `asked` and its drafts, once it is there
    is_slow: bool = False  # its masks take long
