"""What the bundled model says under a grammar, through the real scheduler and device.

It computes in float64, so that an output is the same whatever runs beside it and however far ahead.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st

from aserve.gpu.build import BuildOptions, build_executor
from aserve.grammar.compile import Compiler, Done
from aserve.grammar.matching import Rules, SequenceMatcher
from aserve.messages.requests import AdmitRequest, Grammar
from aserve.messages.results import BuildMask, MaskReady
from aserve.text.load import load_tokenizer
from aserve.text.tokenizer import TextTokenizer
from aserve.tiny import MODEL_DIR
from tests.gpu.drive import Served, request, serve
from tests.grammar.languages import SIXTEEN, Language, regex, schema
from tests.grammar.libraries import vocabulary

AHEAD = [(2, 1), (2, 2), (3, 3)]
TEMPERATURES = (0.0, 0.7, 1.0, 2.0)


@functools.cache
def tokenizer() -> TextTokenizer:
    return load_tokenizer(Path(MODEL_DIR))


@functools.cache
def compiler() -> Compiler:
    return Compiler(vocabulary())


@functools.cache
def compiled(grammar: Grammar) -> xgrammar.CompiledGrammar:
    result = compiler().try_out(grammar)
    assert isinstance(result, Done), (grammar, result)
    return compiler().compile(grammar)


class Matchers:
    def __init__(self, requests: list[AdmitRequest]) -> None:
        self._by_sequence = {
            (asked.request_id, child): SequenceMatcher(
                Rules(asked, compiled(asked.sampling.grammar))
            )
            for asked in requests
            if asked.sampling.grammar is not None
            for child in range(asked.sampling.n)
        }

    def fill(self, ask: BuildMask) -> MaskReady:
        return self._by_sequence[ask.request_id, ask.child].fill(ask)


def ask(
    name: str, language: Language | None, prompt: str = "Here it is: ", **sampling: Any
) -> AdmitRequest:
    ids = tokenizer().encode(prompt, with_special=True)
    grammar = None if language is None else language.grammar
    fields = {"max_tokens": 60, "seed": sum(name.encode()), **sampling}
    return request(name, ids, end_ids=tokenizer().eos_ids, grammar=grammar, **fields)


def run(requests: list[AdmitRequest], *, chaos: int = 0, **options: Any) -> Served:
    values: dict[str, Any] = {"dtype": "float64", "max_model_len": 256, "debug_checks": True}
    values |= {"page_size": 4, "num_pages": 400, "max_rows": 20, "max_batched_tokens": 64}
    values |= options
    executor = build_executor(BuildOptions(Path(MODEL_DIR), **values))
    return serve(executor, requests, chaos=chaos, fill=Matchers(requests).fill)


def text_of(outputs: list[int]) -> str:
    return tokenizer().decode([i for i in outputs if i not in tokenizer().eos_ids])


def assert_in_language(served: Served, key: tuple[str, int], language: Language) -> None:
    """A cut output has no end id; whatever ended by itself is in the language."""
    outputs = served.outputs[key]
    [reason] = served.reasons[key]
    if reason == "stop":
        assert outputs[-1] in tokenizer().eos_ids
        assert language.has(text_of(outputs)), (language.grammar, text_of(outputs))
    else:
        assert reason == "length"
        assert not set(outputs) & set(tokenizer().eos_ids)


def sixteen_at_once(**sampling: Any) -> list[AdmitRequest]:
    """At several temperatures, two choices of some, beside one that is free."""
    constrained = [
        ask(f"r{i}", language, temperature=TEMPERATURES[i % 4], n=1 + (i % 5 == 0), **sampling)
        for i, language in enumerate(SIXTEEN)
    ]
    return [*constrained, ask("free", None, temperature=1.0, max_tokens=30)]


@functools.cache
def plain() -> Served:
    """The loop without overlap."""
    return run(sixteen_at_once(), depth=1, lead=1)


@pytest.mark.slow
@pytest.mark.parametrize(("depth", "lead"), AHEAD)
def test_sixteen_languages_in_one_batch_are_kept_to_however_far_it_runs_ahead(
    depth: int, lead: int
) -> None:
    served = run(sixteen_at_once(), depth=depth, lead=lead, chaos=depth * 10 + lead)
    for name, child in served.outputs:
        if name != "free":
            assert_in_language(served, (name, child), SIXTEEN[int(name[1:])])
    assert served.outputs == plain().outputs
    assert served.reasons == plain().reasons
    num_ended = sum(reasons == ["stop"] for reasons in served.reasons.values())
    assert num_ended > len(SIXTEEN) // 2, "most come to an end"


@pytest.mark.slow
def test_rows_that_step_back_keep_to_their_language_and_their_tokens() -> None:
    """A matcher goes on where it was when its row comes again."""
    languages = [schema({"type": "string", "minLength": 30, "maxLength": 60}), *SIXTEEN[:4]]
    requests = [
        ask(f"r{i}", language, temperature=1.0, max_tokens=40)
        for i, language in enumerate(languages * 2)
    ]
    served = run(requests, depth=3, lead=3, chaos=3, num_pages=24)
    assert served.num_retracted > 0
    assert served.outputs == run(requests, depth=1, lead=1).outputs
    for i, language in enumerate(languages * 2):
        assert_in_language(served, (f"r{i}", 0), language)


@pytest.mark.slow
def test_a_prefix_hit_and_several_choices_change_no_token() -> None:
    prompt = "A long prompt that all of them share, so that its pages are computed once: "
    requests = [
        ask(f"r{i}", SIXTEEN[1], prompt, temperature=1.0, n=3, logprobs=2, seed=i) for i in range(4)
    ]
    served = run(requests, depth=2, lead=2, chaos=8, max_rows=2)
    assert served.num_cached > 0
    alone = [run([one], depth=1, lead=1, prefix_cache=False).outputs for one in requests]
    assert served.outputs == {key: ids for outputs in alone for key, ids in outputs.items()}


@pytest.mark.slow
def test_an_output_that_is_cut_is_the_beginning_of_the_whole_one() -> None:
    whole = plain().outputs
    cut = run(sixteen_at_once(max_tokens=3), depth=2, lead=2).outputs
    for i in range(len(SIXTEEN)):
        assert cut[f"r{i}", 0] == whole[f"r{i}", 0][:3]


LEAVES = st.sampled_from(
    [
        {"type": "integer", "minimum": -5, "maximum": 300},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": ["a", "b c", 3, None]},
        {"type": "string", "maxLength": 5},
        {"anyOf": [{"type": "null"}, {"type": "string", "minLength": 1, "maxLength": 2}]},
    ]
)


def _compound(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def an_object(properties: dict[str, Any], num_required: int) -> dict[str, Any]:
        required = list(properties)[:num_required]
        return {"type": "object", "properties": properties, "required": required}

    names = st.sampled_from(["a", "b", "key with spaces", "ключ"])
    return st.one_of(
        st.builds(an_object, st.dictionaries(names, inner, max_size=3), st.integers(0, 3)),
        st.builds(lambda items: {"type": "array", "items": items, "maxItems": 2}, inner),
    )


SCHEMAS = st.recursive(LEAVES, _compound, max_leaves=4)
ATOMS = st.sampled_from(["a", "[b-d]", r"\d", "한", "(x|yz)", "[^a-z]", " "])
COUNTS = st.sampled_from(["", "?", "{2}", "{1,3}"])
REGEXES = st.lists(st.tuples(ATOMS, COUNTS).map("".join), min_size=1, max_size=4).map("".join)


@pytest.mark.slow
@settings(max_examples=5)
@given(
    st.lists(SCHEMAS, min_size=1, max_size=4),
    st.lists(REGEXES, min_size=1, max_size=4),
    st.sampled_from(AHEAD),
    st.integers(0, 1000),
)
def test_any_schemas_and_regexes_are_kept_to(
    schemas: list[Any], regexes: list[str], ahead: tuple[int, int], seed: int
) -> None:
    languages = [*map(schema, schemas), *map(regex, regexes)]
    requests = [
        ask(f"r{i}", language, "x", temperature=TEMPERATURES[i % 4], seed=seed + i, max_tokens=40)
        for i, language in enumerate(languages)
    ]
    served = run(requests, depth=ahead[0], lead=ahead[1], chaos=seed)
    for i, language in enumerate(languages):
        assert_in_language(served, (f"r{i}", 0), language)
    assert served.outputs == run(requests, depth=1, lead=1).outputs
