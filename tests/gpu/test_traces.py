"""The whole device side under the real scheduler, on random traces: each request gets the tokens of
the plain engine, whatever runs beside it, in which order, and whatever fails.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aserve.engine_core import LocalExecutor
from aserve.errors import StepError
from aserve.gpu.decode.autoregressive import Autoregressive
from aserve.gpu.decode.base import DecodeMode
from aserve.gpu.device.base import Device
from aserve.gpu.hisparse.config import HiSparseConfig
from aserve.gpu.models.base import DraftModel
from aserve.gpu.spec.base import AFTER_NORM
from aserve.gpu.spec.mode import Speculative
from aserve.gpu.spec.multi_layer import MultiLayer
from aserve.gpu.spec.registry import BLOCK, REJECTION
from aserve.gpu.spec.rejection import Verification
from aserve.messages.requests import AdmitRequest, ReasoningIds
from aserve.messages.results import BuildMask, MaskReady
from tests.fakes.drafters import Stumbling, StumblingTree, speculative
from tests.fakes.graph_device import GraphDevice
from tests.fakes.hash_model import VOCAB, FlakyModel, HashModel
from tests.fakes.hidden_draft import HiddenModules
from tests.fakes.late_device import LateDevice
from tests.fakes.toy_device import TOY, ToyMatchers, min_tokens_of
from tests.gpu.drive import Served, captured, make_executor, request, serve
from tests.gpu.naive_sampler import naive_token
from tests.gpu.plain_engine import picking, plain_outputs, plain_run, plain_tokens
from tests.gpu.prompt_checks import assert_prompt

PACES = [(depth, lead) for depth in range(1, 5) for lead in range(1, depth + 1)]
STEM = [(11 * i * i + 5 * i + 3) % VOCAB for i in range(40)]  # what prompts share

MODULES = HiddenModules(3)
DRAFT_MODELS: dict[str, DraftModel] = {"modules": MODULES, "modules, block": MODULES}
MODES: dict[str, Callable[[], DecodeMode]] = {
    "plain": Autoregressive,
    "two tokens": lambda: speculative(Stumbling(1, every=2)),
    "chain": lambda: speculative(Stumbling(4)),
    "tree": lambda: speculative(StumblingTree()),
    "modules": lambda: Speculative(MultiLayer(MODULES.modules, hidden_size=32, inputs=AFTER_NORM)),
    "rejection": lambda: speculative(Stumbling(4, flatness=0.5), REJECTION),
    "block": lambda: speculative(Stumbling(4, flatness=0.5), BLOCK),
    "modules, block": lambda: Speculative(
        MultiLayer(MODULES.modules, hidden_size=32, inputs=AFTER_NORM),
        verification=Verification(VOCAB, 3, is_block=True),
    ),
}
# Their tokens are other ones than those of the plain engine, which has the same distribution.
OTHER_TOKENS = ("rejection", "block", "modules, block")

LIMITS = [
    ReasoningIds(((7,),), ((1, 4, 9), (2,)), is_open=True, max_tokens=3),
    ReasoningIds(((5,), (11,)), ((6,),), max_tokens=1),
]
EXTRAS: dict[str, st.SearchStrategy[Any]] = {
    "presence_penalty": st.sampled_from([0.0, 0.5]),
    "frequency_penalty": st.sampled_from([0.0, -0.7]),
    "repetition_penalty": st.sampled_from([1.0, 1.2]),
    "logit_bias": st.sampled_from([(), ((5, 4.0), (3, -100.0))]),
    "min_tokens": st.integers(0, 4),
    "grammar": st.sampled_from([None, None, TOY]),
    "allowed_token_ids": st.sampled_from([(), (), (0, 2, 3, 5, 7, 11, 13)]),
    "bad_word_ids": st.sampled_from([(), ((5,), (7, 2), (2, 11, 0))]),
    "logprobs": st.sampled_from([None, 0, 3]),
    "prompt_logprobs": st.sampled_from([None, 0, 2]),
}


@dataclass(frozen=True)
class Trace:
    requests: list[AdmitRequest]
    options: dict[str, Any]
    window: int | None
    second_window: int | None
    is_latent: bool  # layers keep latents
    top_k: int  # of them a query sees these many, which an indexer chooses; 0: all
    id_window: int  # ids that a token's embedding depends on
    fails: frozenset[int]
    fails_in_replays: bool  # the numbers are those of replays, not of forwards
    is_unsound: bool  # failing steps give NaN, which shows after later steps have run
    failing_mask: int | None  # of the first request's first child: the output that it is for
    mode: str
    captures_at_start: bool
    chaos: int
    failed_masks: list[int] = field(default_factory=list)  # the outputs for which a mask failed

    def model(self, device: torch.device | None = None) -> FlakyModel:
        return FlakyModel(
            () if self.fails_in_replays else self.fails,
            window=self.window,
            second_window=self.second_window,
            is_latent=self.is_latent,
            top_k=self.top_k,
            id_window=self.id_window,
            is_unsound=self.is_unsound,
            device=device,
        )

    def fill(self, ask: BuildMask, matchers: ToyMatchers) -> MaskReady:
        """Windows begin at some outputs only: the first one from `failing_mask` on fails."""
        ready = matchers.fill(ask)
        is_first = (ask.request_id, ask.child) == ("r0", 0)
        if not is_first or self.failing_mask is None or ask.position < self.failing_mask:
            return ready
        self.failed_masks.append(ask.position)
        error = StepError("the mask failed, as the test wants it").info()
        return MaskReady(ask.request_id, ask.child, ask.position, mask=b"", error=error)


@st.composite
def requests(draw: st.DrawFn, number: int, *, is_plain: bool) -> AdmitRequest:
    """A plain one has nothing that makes its decode steps run eagerly."""
    prompt = STEM[: draw(st.integers(1, 24))]
    if draw(st.booleans()):
        prompt[-1] = draw(st.integers(0, VOCAB - 1))
    embeds = draw(st.sampled_from([False, False, True]))
    extras = {} if is_plain else draw(st.fixed_dictionaries(EXTRAS))
    return request(
        f"r{number}",
        prompt,
        embeds=embeds,
        reasoning=draw(st.sampled_from([None, None, *LIMITS])),
        end_ids=draw(st.sampled_from([(), (3, 8)])),
        seed=draw(st.integers(-(2**63), 2**63)),
        temperature=draw(st.sampled_from([0.0, 0.8, 1.0])),
        top_k=draw(st.sampled_from([0, 0, 5])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.7])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.1])),
        max_tokens=0 if embeds else draw(st.integers(0, 12)),
        n=1 if embeds else draw(st.sampled_from([1, 1, 2])),
        **extras,
    )


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    page_size = draw(st.sampled_from([1, 2, 4, 16, 32, 64]))
    depth, lead = draw(st.sampled_from(PACES))
    alone = -(-36 // page_size)  # the longest request
    graph_rows = draw(st.sampled_from([0, 0, 1, 3, 5]))
    is_unsound = draw(st.booleans()) and not graph_rows  # NaN would be captured for good
    # A row whose trial fails, too, is guilty: failures are further apart than a step and the trials
    # of its rows, between which steps go by that nobody hears of.
    gaps = draw(st.lists(st.integers(12, 24), max_size=4))
    gaps[:1] = [gap - 9 for gap in gaps[:1]]
    window = draw(st.sampled_from([None, 6]))
    is_plain = draw(st.booleans())
    mode = draw(st.sampled_from(sorted(MODES)))
    is_latent = window is None and draw(st.booleans())
    is_sparse = is_latent and "tree" not in mode and draw(st.booleans())
    needs_reference = is_latent or "tree" in mode
    top_k = draw(st.sampled_from([3, 5, 9])) if is_sparse else 0
    hot = st.builds(
        HiSparseConfig,
        device_buffer_size=st.integers(top_k, top_k + 20),
        backup_interval=st.integers(1, 3),
    )
    backends = ["torch-ref"] if needs_reference else ["paged-sdpa", "torch-ref"]
    numbers = range(draw(st.integers(1, 6)))
    return Trace(
        requests=[draw(requests(number, is_plain=is_plain)) for number in numbers],
        options={
            "page_size": page_size,
            "num_pages": alone + 1 + draw(st.sampled_from([0, 1, 3, 100])),
            "depth": depth,
            "lead": lead,
            "max_rows": draw(st.integers(1, 5)),
            "max_batched_tokens": draw(st.sampled_from([3, 8, 64])),
            "prefix_cache": draw(st.booleans()),
            "attention": draw(st.sampled_from(backends)),
            "graph_rows": graph_rows,
            "piece_tokens": draw(st.sampled_from([None, 0, 9, 64])),
            "hisparse": draw(st.none() | hot) if is_sparse else None,
        },
        window=window,
        # A draft model is made for the hidden states of two layers.
        second_window=draw(st.sampled_from([None, 3]))
        if window and mode not in DRAFT_MODELS
        else None,
        is_latent=is_latent,
        top_k=top_k,
        id_window=draw(st.sampled_from([1, 1, 3])),
        fails=frozenset(sum(gaps[: number + 1]) for number in range(len(gaps))),
        fails_in_replays=graph_rows > 0 and draw(st.booleans()),
        is_unsound=is_unsound,
        failing_mask=draw(st.none() | st.integers(0, 3)),
        mode=mode,
        captures_at_start=draw(st.booleans()),
        chaos=draw(st.integers(0, 2**32)),
    )


@pytest.fixture
def expands_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Latents are expanded for short chunks of prompts, too, whose keys are chosen row by row."""
    monkeypatch.setattr("aserve.gpu.attention.latents.MIN_QUERIES", 2)
    monkeypatch.setattr("aserve.gpu.attention.sparse.SHORT_ROW", 5)


@pytest.mark.slow
@pytest.mark.usefixtures("expands_early")
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(traces())
def test_any_trace_gives_the_tokens_of_the_plain_engine(trace: Trace) -> None:
    mode = MODES[trace.mode]()
    device: Device = GraphDevice(failing_replays=trace.fails if trace.fails_in_replays else ())
    if trace.is_unsound:
        device = LateDevice()
        device.is_done.set()
    drafter = DRAFT_MODELS.get(trace.mode)
    executor = make_executor(
        trace.model(), mode=mode, device=device, drafter=drafter, **trace.options
    )
    if trace.captures_at_start:
        captured(executor)
    assert_plain(trace, serve_trace(executor, trace))


def serve_trace(executor: LocalExecutor, trace: Trace, *, tier_pages: int = 0) -> Served:
    matchers = ToyMatchers(executor.spec.vocab_size)
    fill = functools.partial(trace.fill, matchers=matchers)
    return serve(executor, trace.requests, chaos=trace.chaos, fill=fill, tier_pages=tier_pages)


def assert_plain(trace: Trace, served: Served) -> None:
    """Each request has the tokens, logprobs, scores and end of the plain engine, which in some
    modes says what the request was told, if it may say that."""
    plain = HashModel(
        window=trace.window,
        second_window=trace.second_window,
        is_latent=trace.is_latent,
        top_k=trace.top_k,
        id_window=trace.id_window,
    )
    for asked in trace.requests:
        for child in range(asked.sampling.n):
            key = asked.request_id, child
            is_other = trace.mode in OTHER_TOKENS
            pick = picking(served.outputs.get(key, [])) if is_other else naive_token
            expected, logprobs = plain_run(plain, asked, child, pick=pick)
            reason, num_outputs = _end_of(trace, asked, child, expected)
            assert served.outputs.get(key, []) == expected[:num_outputs]
            assert served.reasons[key] == [reason]
            if asked.sampling.logprobs is not None:
                found = served.logprobs.get(key, [])
                num_forced = len(expected) - len(logprobs)
                assert num_forced == 0 or asked.reasoning is not None
                assert found == pytest.approx(logprobs[: len(found)], abs=1e-4)
                assert num_outputs - num_forced <= len(found) <= num_outputs
            if reason != "error":
                assert_prompt(plain, asked, child, served)


def _end_of(trace: Trace, asked: AdmitRequest, child: int, expected: list[int]) -> tuple[str, int]:
    """Why it ends, and after how many of the plain engine's tokens."""
    if trace.failed_masks and (asked.request_id, child) == ("r0", 0):
        assert "plain" not in trace.mode or trace.failed_masks[0] == trace.failing_mask
        return "error", trace.failed_masks[0]
    has_end = bool(expected) and expected[-1] in asked.end_ids
    is_stop = has_end and len(expected) > min_tokens_of(asked.sampling)
    return "stop" if is_stop else "length", len(expected)


@pytest.mark.parametrize("is_unsound", [False, True])
def test_failing_steps_cost_nobody_a_token(is_unsound: bool) -> None:
    """The NaN of an unsound step shows when the waiter reads it; the device has gone on with what
    it left behind.
    """
    asked = [request(f"r{number}", STEM[number : number + 9], max_tokens=20) for number in range(4)]
    device = LateDevice()
    device.is_done.set()
    model = FlakyModel({4, 14}, is_unsound=is_unsound)
    served = serve(make_executor(model, device=device, depth=4, lead=4), asked)
    assert served.num_resyncs == 2
    assert served.outputs == plain_tokens(asked)


def test_rows_beside_rejected_drafts_get_their_own_tokens_and_logprobs() -> None:
    asked = [request(f"r{number}", STEM[number : number + 9], logprobs=1) for number in range(3)]
    served = serve(make_executor(HashModel(), mode=MODES["two tokens"]()), asked)
    for each in asked:
        tokens, logprobs = plain_run(HashModel(), each)
        assert served.outputs[each.request_id, 0] == tokens
        assert served.logprobs[each.request_id, 0] == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.parametrize("lead", [1, 3])
def test_bad_words_are_never_emitted_however_far_the_scheduler_runs_ahead(lead: int) -> None:
    """What a row would say is forbidden it pair by pair, under retraction: no pair comes through,
    and each row gets the tokens of the plain engine.
    """
    free = [request(f"r{number}", STEM[number : number + 12], max_tokens=20) for number in range(4)]
    said = [plain_outputs(HashModel(), asked) for asked in free]
    words = [tuple(itertools.pairwise(tokens)) for tokens in said]
    asked = [
        msgspec.structs.replace(each, bad_word_ids=(*pairs, (pairs[0][0],)))
        for each, pairs in zip(free, words, strict=True)
    ]
    executor = make_executor(HashModel(), num_pages=13, depth=lead, lead=lead)
    served = serve(executor, asked)
    assert served.num_retracted > 0
    assert served.outputs == plain_tokens(asked)
    for each in asked:
        tokens = served.outputs[each.request_id, 0]
        assert not set(itertools.pairwise(tokens)) & set(each.bad_word_ids)
        assert each.bad_word_ids[-1][0] not in tokens


def test_a_prefix_hit_counts_its_tokens_for_penalties() -> None:
    """Trap 3: a history is what lies beside the KV, not what this row's steps have shown. What the
    cache had is penalised, and so is the token that is still in flight.
    """
    asked = [
        request(f"r{number}", [*STEM[:16], number], repetition_penalty=2.0, presence_penalty=1.0)
        for number in range(2)
    ]
    served = serve(make_executor(HashModel(), max_rows=1), asked)
    assert served.num_cached == 16
    assert served.outputs == plain_tokens(asked)
