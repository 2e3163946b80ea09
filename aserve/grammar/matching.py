"""Computes the masks of allowed next tokens, with one matcher per sequence.

A matcher accepts each output token once. Only the thread that fills its masks writes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from aserve.errors import BugError, ClientError, InvalidRequest
from aserve.grammar.library import GrammarLibrary
from aserve.messages.base import MASK_BITS, ArrayI32, array_i32, num_mask_words, num_values
from aserve.messages.requests import AdmitRequest
from aserve.messages.results import BuildMask, MaskReady

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, GrammarMatcher


class Matcher(Protocol):
    def fill(self, ask: BuildMask) -> MaskReady:
        """Computes a mask in the calling thread. An exception ends the request."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """grammars -> masks, before the AdmitRequest: a matcher for each child of the request.

    `param` is the field that errors name; `is_slow` says that its masks took long when the grammar
    was tried out.
    """

    request_id: str
    matchers: tuple[Matcher, ...]
    client: str = ""
    param: str = "structured_outputs"
    is_slow: bool = False


class Rules:
    """The compiled grammar of a request and the rules for its end tokens, shared by its children.

    A sequence may end only where the grammar is complete. While another token is possible,
    `min_tokens` forbids every end token before that position, and `ignore_eos` forbids those that
    the client did not name in stop_token_ids.
    """

    __slots__ = (
        *("_eos", "_every_end", "_min_tokens"),
        *("compiled", "end_ids", "every_id", "num_kept", "param"),
    )

    def __init__(self, request: AdmitRequest, compiled: CompiledGrammar) -> None:
        """Keeps the compiled grammar alive after the cache has evicted it."""
        sampling = request.sampling
        assert sampling.grammar is not None
        vocab_size = compiled.tokenizer_info.vocab_size
        eos_ids = [i for i in request.end_ids if i not in sampling.stop_token_ids]
        self.compiled = compiled
        self.param = sampling.grammar.param
        self.end_ids = list(request.end_ids)
        self.every_id = _bits(range(vocab_size), vocab_size)
        # Tokens with which a fork begins. The client may have chosen the last one.
        self.num_kept = sum(map(num_values, () if request.is_resumed else request.outputs))
        self._min_tokens = sampling.min_tokens
        self._every_end = _bits(self.end_ids, vocab_size)
        self._eos = _bits(eos_ids if sampling.ignore_eos else [], vocab_size)

    def without_end_tokens(self, mask: ArrayI32, position: int) -> ArrayI32:
        """Returns `mask`, int32 [words], without the end tokens that are not allowed at `position`,
        unless no other token remains.
        """
        left = mask & ~(self._every_end if position < self._min_tokens else self._eos)
        return left if left.any() else mask


class SequenceMatcher:
    """The matcher of one child of a request. It is made with the first mask."""

    __slots__ = ("_matcher", "_num_seen", "_rules")

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._matcher: GrammarMatcher | None = None
        self._num_seen = 0

    def fill(self, ask: BuildMask) -> MaskReady:
        """Returns the mask, or the error of a sequence for which no token is allowed, or of a fork
        that begins with one that is not. Raises BugError for an output that the grammar does not
        allow.
        """
        if self._matcher is None:
            self._matcher = _new_matcher(self._rules)
        try:
            self._accept(self._matcher, array_i32(ask.new_ids))
            mask = self._next_mask(self._matcher, ask.position)
        except ClientError as error:
            return MaskReady(ask.request_id, ask.child, ask.position, b"", error.info())
        masks = b"".join((mask.tobytes(), self._draft_masks(self._matcher, ask, mask)))
        return MaskReady(ask.request_id, ask.child, ask.position, masks)

    def _draft_masks(self, matcher: GrammarMatcher, ask: BuildMask, root: ArrayI32) -> bytes:
        """Returns the masks after each draft, int32 [drafts, words]. After a draft that the grammar
        does not allow, that ends the output, or that nothing can follow, the mask is empty: such a
        draft is emitted at most as the last token of its step.
        """
        tokens, parents = array_i32(ask.drafts).tolist(), array_i32(ask.parents).tolist()
        masks = np.zeros((1 + len(tokens), len(root)), np.int32)
        masks[0] = root
        children: list[list[int]] = [[] for _ in masks]
        for node, parent in enumerate(parents or range(len(tokens)), start=1):
            children[parent].append(node)

        def fill_below(parent: int, position: int) -> None:
            for node in children[parent]:
                token = tokens[node - 1]
                if masks[parent, token // MASK_BITS] >> (token % MASK_BITS) & 1:
                    matcher.accept_token(token)
                    masks[node] = self._allowed(matcher, position)
                    fill_below(node, position + 1)
                    matcher.rollback(1)

        fill_below(0, ask.position + 1)
        return masks[1:].tobytes()

    def _accept(self, matcher: GrammarMatcher, new_ids: ArrayI32) -> None:
        for token_id in new_ids.tolist():
            if not matcher.accept_token(token_id):
                wrong = f"output {self._num_seen}, token {token_id}, does not match the grammar"
                if self._num_seen < self._rules.num_kept:
                    raise InvalidRequest(
                        f"Invalid 'token_id': {wrong}.", param="token_id", code="invalid_value"
                    )
                raise BugError(wrong)
            self._num_seen += 1

    def _next_mask(self, matcher: GrammarMatcher, position: int) -> ArrayI32:
        if self._num_seen != position:
            raise BugError(f"the matcher saw {self._num_seen} outputs at output {position}")
        mask, param = self._allowed(matcher, position), self._rules.param
        if not mask.any():
            raise InvalidRequest(
                f"Invalid '{param}': after {position} tokens none of the model's tokens "
                "continues a match. Is one that the grammar needs among the stop_token_ids?",
                param=param,
                code="grammar_dead_end",
            )
        return mask

    def _allowed(self, matcher: GrammarMatcher, position: int) -> ArrayI32:
        """Returns the mask at the matcher's place, which is empty after the end."""
        every_id = self._rules.every_id
        words: ArrayI32 = np.zeros((1, len(every_id)), np.int32)
        if matcher.is_terminated():
            return np.zeros_like(every_id)
        is_needed = matcher.fill_next_token_bitmask(words)
        # NOTE: bits behind the vocabulary may be set.
        mask = words[0] & every_id if is_needed else every_id
        return self._rules.without_end_tokens(mask, position)


async def constrain(library: GrammarLibrary, request: AdmitRequest) -> Constraint:
    """Makes the matchers of a request. Raises the AserveError of an invalid grammar."""
    grammar = request.sampling.grammar
    assert grammar is not None
    if not request.end_ids:
        raise InvalidRequest(
            f"Invalid '{grammar.param}': this model has no token that ends an output. "
            "Name one in stop_token_ids.",
            param=grammar.param,
            code="no_end_token",
        )
    known = await library.compiled(grammar, client=request.client)
    rules = Rules(request, known.compiled)
    return Constraint(
        request.request_id,
        tuple(SequenceMatcher(rules) for _ in range(request.sampling.n)),
        client=request.client,
        param=grammar.param,
        is_slow=known.is_slow,
    )


def _new_matcher(rules: Rules) -> GrammarMatcher:
    from xgrammar import GrammarMatcher

    return GrammarMatcher(rules.compiled, override_stop_tokens=rules.end_ids)


def _bits(token_ids: Sequence[int], vocab_size: int) -> ArrayI32:
    """int32 [ceil(vocab / 32)], with the bits of `token_ids` set."""
    is_set = np.zeros(num_mask_words(vocab_size) * MASK_BITS, np.bool_)
    is_set[token_ids] = True
    return np.packbits(is_set, bitorder="little").view(np.int32)
