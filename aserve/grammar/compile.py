"""Compiles a grammar with xgrammar, which is imported when the first compiler is made."""

from __future__ import annotations

import os
import re
import time
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from aserve.errors import InvalidRequest
from aserve.grammar.mask_budget import ALLOWANCE_S, SLOW_S
from aserve.grammar.schema import ignored_keyword, schema_formats
from aserve.messages.base import num_mask_words
from aserve.messages.requests import Grammar

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, GrammarCompiler, TokenizerInfo

ANY_OBJECT = '{"type":"object","additionalProperties":true}'
# Whitespace between two tokens of JSON: a line end and a blank. WHY: without a bound small models
# write blanks to the end of their context; and a bound of n multiplies the states by n + 1.
MAX_WHITESPACE = 2
TRIAL_TOKENS = 48
TRIAL_STEP = 0x9E3779B1  # odd, and far from every small multiple of a power of two
MAX_MESSAGE = 500  # characters
# What the compiler writes before its message: time, source line and the failed condition.
PREFIX = re.compile(r"\[[\d:]+\] \S+: (Warning: )?(Check failed: \(.*\) is false: )?", re.DOTALL)


class Vocabulary(msgspec.Struct, frozen=True):
    """The bytes of each token id, empty for a token without text.

    `vocab_size` is that of the logits, which may be padded; `end_ids` are the tokens that end an
    answer.
    """

    tokens: tuple[bytes, ...]
    vocab_size: int
    end_ids: tuple[int, ...]


class Done(msgspec.Struct, frozen=True, tag=True):
    """The grammar compiles within the limits and matches tokens; `is_slow` if its masks took long.

    WHY: the server compiles it again instead of reading what the worker made: xgrammar's JSON of a
    compiled grammar grows with the square of its rules (500 properties: 129 MB and 10 s, while
    compiling them takes 2 MB and 0.1 s).
    """

    is_slow: bool


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The error for the client. `message` continues a sentence that names the request's field."""

    code: str
    message: str


class GrammarError(Exception):
    """The grammar is invalid; the message is for the client."""


def token_info(vocabulary: Vocabulary) -> TokenizerInfo:
    """Builds xgrammar's vocabulary. It never allows a token without bytes.

    Raises InvalidRequest where xgrammar is not installed.
    """
    try:
        from xgrammar import TokenizerInfo, VocabType
    except ImportError:
        raise InvalidRequest(
            "This server cannot constrain outputs by a grammar: xgrammar is not installed there.",
            code="grammar_unavailable",
        ) from None

    return TokenizerInfo(
        list(vocabulary.tokens),
        VocabType.RAW,
        vocab_size=vocabulary.vocab_size,
        stop_token_ids=list(vocabulary.end_ids) or None,
    )


class Compiler:
    """Compiles grammars for one vocabulary. Several threads may use it at once."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocab_size = vocabulary.vocab_size
        self._info = token_info(vocabulary)

    def try_out(self, grammar: Grammar) -> Done | Failed:
        """Compiles the grammar and matches some tokens. Raises MemoryError.

        NOTE: it may take any time and memory, and the process's stderr is redirected meanwhile.
        """
        try:
            with _Warnings() as warnings:
                compiled = self.compile(grammar)
                if warning := warnings.first():
                    raise GrammarError(warning)
            return Done(is_slow=self._match_some(compiled) >= SLOW_S)
        except (GrammarError, RuntimeError) as error:  # RuntimeError is xgrammar's
            if "bad_alloc" in str(error):
                raise MemoryError from error
            return Failed("invalid_grammar", PREFIX.sub("", str(error)).strip(". \n")[:MAX_MESSAGE])

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compiles a grammar that `try_out` has accepted; raises GrammarError or RuntimeError for
        another.
        """
        from xgrammar import GrammarCompiler

        compiler = GrammarCompiler(self._info, max_threads=1, cache_enabled=False)
        match grammar.kind:
            case "json_schema":
                _check_schema(grammar.source)
                return _compile_schema(compiler, grammar.source)
            case "json_object":
                return _compile_schema(compiler, ANY_OBJECT)
            case "regex":
                return compiler.compile_regex(grammar.source)
            case "ebnf":
                return compiler.compile_grammar(grammar.source)
            case "choice":
                return compiler.compile_grammar(choice_ebnf(grammar.source))
            case "structural_tag":
                return compiler.compile_structural_tag(bounded_tag(grammar.source))

    def _match_some(self, compiled: CompiledGrammar) -> float:
        """Matches TRIAL_TOKENS tokens, so that a grammar whose matcher explodes does so here.
        Returns by how many seconds its masks exceeded ALLOWANCE_S each.
        """
        from xgrammar import GrammarMatcher

        matcher = GrammarMatcher(compiled)
        mask = np.zeros((1, num_mask_words(self._vocab_size)), np.int32)
        excess_s = 0.0
        for number in range(TRIAL_TOKENS):
            began_s = time.thread_time()
            matcher.fill_next_token_bitmask(mask)
            bits = np.unpackbits(mask.view(np.uint8), count=self._vocab_size, bitorder="little")
            ids = np.setdiff1d(np.flatnonzero(bits), matcher.stop_token_ids)
            if not len(ids):
                if number == 0 and not matcher.is_completed():
                    raise GrammarError("no text of this model's tokens matches it")
                break
            matcher.accept_token(int(ids[number * TRIAL_STEP % len(ids)]))
            excess_s += max(0.0, time.thread_time() - began_s - ALLOWANCE_S)
        return excess_s


def _compile_schema(compiler: GrammarCompiler, schema: str) -> CompiledGrammar:
    return compiler.compile_json_schema(schema, max_whitespace_cnt=MAX_WHITESPACE)


class _Warnings:
    """Captures stderr, where the compiler's C++ code warns of keywords that it ignores."""

    def __enter__(self) -> _Warnings:
        self._file = os.memfd_create("warnings")
        self._stderr = os.dup(2)
        os.dup2(self._file, 2)
        return self

    def first(self) -> str:
        text = os.pread(self._file, MAX_MESSAGE, 0).decode(errors="replace")
        return text.partition("\n")[0]

    def __exit__(self, *_: object) -> None:
        os.dup2(self._stderr, 2)
        os.close(self._stderr)
        os.close(self._file)


def choice_ebnf(source: str) -> str:
    """Turns a JSON list of texts into a rule of alternatives, with all but ASCII alphanumerics
    escaped.
    """
    try:
        choices = msgspec.json.decode(source, type=list[str])
    except msgspec.DecodeError as error:
        raise GrammarError(f"it is not a list of texts: {error}") from None
    if not choices:
        raise GrammarError("the list is empty")
    return "root ::= " + " | ".join(f'"{_escaped(choice)}"' for choice in choices)


def _escaped(text: str) -> str:
    return "".join(
        char if char.isascii() and char.isalnum() else f"\\U{ord(char):08x}" for char in text
    )


def bounded_tag(source: str) -> str:
    """Checks the schemas of a structural tag, and bounds the whitespace in each."""
    tag = _decoded(source, "structural tag")
    for schema_format in schema_formats(tag):
        _refuse_ignored(schema_format["json_schema"])
        if schema_format["type"] == "json_schema":
            schema_format.setdefault("max_whitespace_cnt", MAX_WHITESPACE)
    return msgspec.json.encode(tag).decode()


def _check_schema(source: str) -> None:
    _refuse_ignored(_decoded(source, "schema"))


def _decoded(source: str, what: str) -> dict[str, Any]:
    try:
        decoded = msgspec.json.decode(source)
    except (msgspec.DecodeError, RecursionError) as error:
        raise GrammarError(f"the {what} is not valid JSON: {error}") from None
    if not isinstance(decoded, dict):
        raise GrammarError(f"a {what} is a JSON object")
    return decoded


def _refuse_ignored(schema: object) -> None:
    if place := ignored_keyword(schema):
        raise GrammarError(f"{place} is not supported, so outputs might not match the schema")
