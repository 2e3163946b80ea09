"""Masks: what may come next, when an end may come, and what a matcher says of a wrong output."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import xgrammar

from aserve.errors import BugError, InvalidRequest
from aserve.grammar.compile import Compiler, Done, Vocabulary
from aserve.grammar.library import GrammarLibrary
from aserve.grammar.matching import Rules, SequenceMatcher, constrain
from aserve.messages.base import pack_i32
from aserve.messages.requests import AdmitRequest, Grammar, SamplingParams
from aserve.messages.results import BuildMask, MaskReady

# a b c ab end1 end2, one id without text, and padding up to 40.
TOKENS = (b"a", b"b", b"c", b"ab", b"", b"", b"")
A, B, C, AB, END, OTHER_END = range(6)
VOCABULARY = Vocabulary(TOKENS, vocab_size=40, end_ids=(END, OTHER_END))


@functools.cache
def compiled(source: str) -> xgrammar.CompiledGrammar:
    compiler, grammar = Compiler(VOCABULARY), Grammar("regex", source)
    assert isinstance(compiler.try_out(grammar), Done)
    return compiler.compile(grammar)


class Play:
    """One sequence whose outputs are given by hand."""

    def __init__(
        self, source: str, *, end_ids: tuple[int, ...] = (END, OTHER_END), **sampling: object
    ) -> None:
        params = SamplingParams(seed=1, grammar=Grammar("regex", source), **sampling)  # type: ignore[arg-type]  # named as there
        request = AdmitRequest("r", pack_i32([9]), params, end_ids)
        self.matcher = SequenceMatcher(Rules(request, compiled(source)))
        self.position = 0

    def ask(self, *new_ids: int) -> MaskReady:
        self.position += len(new_ids)
        return self.matcher.fill(BuildMask("r", 0, self.position, pack_i32(new_ids)))

    def allowed(self, *new_ids: int) -> list[int]:
        ready = self.ask(*new_ids)
        assert ready.error is None
        assert len(ready.mask) == 8, "40 ids are two words"
        bits = np.unpackbits(np.frombuffer(ready.mask, np.uint8), bitorder="little")
        return np.flatnonzero(bits).tolist()


def test_the_mask_follows_the_outputs_token_by_token() -> None:
    play = Play("abc?")
    assert play.allowed() == [A, AB]
    assert play.allowed(A) == [B]
    assert play.allowed(B) == [C, END, OTHER_END]
    assert play.allowed(C) == [END, OTHER_END]


CHAIN: tuple[int, ...] = ()


@pytest.mark.parametrize(
    ("drafts", "parents", "expected"),
    [
        # a draft outside the language, and what follows it, is never gone through
        ([A, B, C], CHAIN, [[B], [C, END, OTHER_END], [END, OTHER_END]]),
        ([A, C, B], CHAIN, [[B], [], []]),
        ([A, B, END, A], CHAIN, [[B], [C, END, OTHER_END], [], []]),
        # two branches behind the root, one of which goes on
        (
            [A, AB, B, C],
            (0, 0, 1, 2),
            [[B], [C, END, OTHER_END], [C, END, OTHER_END], [END, OTHER_END]],
        ),
    ],
)
def test_masks_after_drafts_follow_their_paths_and_leave_the_matcher_where_it_was(
    drafts: list[int], parents: tuple[int, ...], expected: list[list[int]]
) -> None:
    play = Play("abc?")
    ready = play.matcher.fill(
        BuildMask("r", 0, 0, b"", drafts=pack_i32(drafts), parents=pack_i32(parents))
    )
    bits = np.unpackbits(np.frombuffer(ready.mask, np.uint8), bitorder="little").reshape(-1, 64)
    assert [np.flatnonzero(row).tolist() for row in bits] == [[A, AB], *expected]
    assert play.allowed(A) == [B]


def test_ids_without_text_and_padding_are_never_allowed() -> None:
    assert Play(".*").allowed() == [A, B, C, AB, END, OTHER_END]
    assert Play("(abc)+").allowed(AB, C, A) == [B], "several outputs are taken at once"


def test_before_min_tokens_an_end_is_allowed_only_where_nothing_can_follow() -> None:
    play = Play("a{0,3}", min_tokens=2)
    assert [play.allowed(), play.allowed(A), play.allowed(A)] == [[A], [A], [A, END, OTHER_END]]
    assert Play("a", min_tokens=5).allowed(A) == [END, OTHER_END]


@pytest.mark.parametrize(("stops", "ends"), [((OTHER_END,), [OTHER_END]), ((), [END, OTHER_END])])
def test_with_ignore_eos_only_the_clients_own_end_may_come_before_the_last(
    stops: tuple[int, ...], ends: list[int]
) -> None:
    play = Play("a{0,2}", ignore_eos=True, stop_token_ids=stops)
    assert play.allowed() == [A, *stops]
    assert play.allowed(A, A) == ends


def test_a_text_token_as_a_stop_is_allowed_only_where_the_language_can_end() -> None:
    play = Play("a+c?b*", end_ids=(END, C), stop_token_ids=(C,))
    assert play.allowed() == [A, AB]
    assert play.allowed(A) == [A, B, C, AB, END]


def test_a_language_that_needs_a_stop_token_ends_in_an_error_that_says_so() -> None:
    play = Play("abc", end_ids=(END, C), stop_token_ids=(C,))
    error = play.ask(AB).error
    assert error is not None
    assert (error.status, error.code) == (400, "grammar_dead_end")
    assert "stop_token_ids" in error.message


@pytest.mark.parametrize("wrong", [C, END, 39])
def test_trap_4_an_output_outside_the_language_is_an_error_of_its_own(wrong: int) -> None:
    what = f"output 1, token {wrong}, does not match the grammar"
    with pytest.raises(BugError, match=what):
        Play("ab").ask(A, wrong)


def matcher_of(*outputs: int, is_resumed: bool) -> SequenceMatcher:
    """The matcher of a sequence that begins with outputs."""
    params = SamplingParams(seed=1, grammar=Grammar("regex", "abc"))
    request = AdmitRequest(
        "r", b"", params, (END,), outputs=(pack_i32(outputs),), is_resumed=is_resumed
    )
    return SequenceMatcher(Rules(request, compiled("abc")))


def test_a_token_of_a_fork_that_the_grammar_forbids_is_its_clients_mistake() -> None:
    matcher = matcher_of(A, C, is_resumed=False)
    error = matcher.fill(BuildMask("r", 0, 2, pack_i32([A, C]))).error
    assert error is not None
    assert (error.status, error.param) == (400, "token_id")


def test_outputs_outside_the_language_after_an_engines_death_are_no_clients_mistake() -> None:
    matcher = matcher_of(A, C, is_resumed=True)
    with pytest.raises(BugError, match="output 1, token 2, does not match the grammar"):
        matcher.fill(BuildMask("r", 0, 2, pack_i32([A, C])))


def test_trap_4_an_output_that_was_not_shown_is_noticed() -> None:
    play = Play("a*")
    play.position = 3
    with pytest.raises(BugError, match="saw 1 outputs at output 4"):
        play.ask(A)


async def test_a_model_without_an_end_needs_one_from_the_client() -> None:
    request = AdmitRequest("r", pack_i32([9]), SamplingParams(1, grammar=Grammar("regex", "a")))
    with pytest.raises(InvalidRequest, match="stop_token_ids"):
        await constrain(library_that_is_not_asked(), request)


def library_that_is_not_asked() -> GrammarLibrary:
    return GrammarLibrary.__new__(GrammarLibrary)
