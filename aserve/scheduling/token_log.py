"""The tokens of one sequence, and the mask of its next one."""

from __future__ import annotations

from array import array

import msgspec

from aserve.messages.base import VALUE_BYTES, ArrayI32, array_i32, num_values
from aserve.messages.executor import DecodeCaps
from aserve.messages.results import RowDrafts


class TokenLog:
    """The prompt and the committed outputs of a sequence, int32; `num` tokens. All children of a
    request share the prompt. The first `prefill_len` tokens were known when the sequence got its
    row, or started anew, so that a prefill computes those of them that have no KV.
    """

    __slots__ = ("_prompt", "outputs", "prefill_len")

    def __init__(self, prompt_ids: bytes, outputs: bytes) -> None:
        self._prompt = prompt_ids  # PERF: an array would have 112 bytes more
        self.outputs = array("i", outputs)
        self.prefill_len = 0

    @property
    def num(self) -> int:
        return len(self._prompt) // VALUE_BYTES + len(self.outputs)  # PERF: read very often

    def span(self, start: int, stop: int) -> ArrayI32:
        """tokens[start:stop], cut at what is known."""
        return array_i32(self.packed(start, stop))

    def packed(self, start: int, stop: int) -> bytes:
        """Returns the same tokens as the bytes of an array."""
        num_prompt = len(self._prompt) // VALUE_BYTES
        if start >= num_prompt:
            return self.outputs[start - num_prompt : stop - num_prompt].tobytes()
        known = self._prompt[VALUE_BYTES * start : VALUE_BYTES * stop]
        return known + self.outputs[: max(stop - num_prompt, 0)].tobytes()

    def at(self, position: int) -> int:
        num_prompt = num_values(self._prompt)
        if position < num_prompt:
            return int(array_i32(self._prompt)[position])
        return self.outputs[position - num_prompt]

    def final_len(self, committed_len: int, block_len: int) -> int:
        """Returns how many of the committed positions have their final KV. In a block that was
        decoded, and not prefilled, it is computed by the first step of the next block.
        """
        if block_len == 1:
            return committed_len
        whole = whole_blocks(committed_len, block_len)
        if whole <= self.prefill_len:
            return whole
        return max(whole_blocks(self.prefill_len, block_len), whole - block_len)


def whole_blocks(num_tokens: int, block_len: int) -> int:
    """Returns how many of the first tokens are in blocks that end among them."""
    return num_tokens // block_len * block_len


def up_to_block(num_tokens: int, block_len: int) -> int:
    """Returns where the block ends that has the last of the tokens."""
    return -(-num_tokens // block_len) * block_len


def max_kv_len(prompt_len: int, max_tokens: int, caps: DecodeCaps) -> int:
    """Returns the KV positions that a sequence can ever need: with a root the last token is
    sampled, but never computed, and a block is computed as a whole.
    """
    return up_to_block(prompt_len + max(max_tokens - caps.root_len, 0), caps.block_len)


class MaskState(msgspec.Struct, gc=False):
    """The mask of the next output, for a sequence with a host-side sampler."""

    asked: int = -1  # the output position of the last BuildMask
    drafts: RowDrafts | None = None  # after that output, of step `drafts_iteration`
    drafts_iteration: int = 0
    num_sent: int = 0  # outputs that BuildMasks have carried
    mask: bytes | None = None  # of output position `asked` and its drafts, once it is there
    is_slow: bool = False  # its masks take long
