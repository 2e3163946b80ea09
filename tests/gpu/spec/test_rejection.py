"""Rejection sampling and block verification: tokens have the target's distribution, more drafts are
accepted than by coupling, and a seeded request repeats exactly.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from aserve.errors import ConfigError
from aserve.gpu.decode.base import StepRunner
from aserve.gpu.device.cpu.device import CpuDevice
from aserve.gpu.sampling.ops import PLAIN_OPS
from aserve.gpu.sampling.params import LogitsRows, RowTables, init_columns
from aserve.gpu.sampling.plan import RowParams
from aserve.gpu.spec.base import DraftRows
from aserve.gpu.spec.drafting import draw_drafts
from aserve.gpu.spec.prediction import Predicted
from aserve.gpu.spec.registry import BLOCK, COUPLED, REJECTION
from aserve.gpu.spec.rejection import WINDOW, Verification, verification_of
from aserve.gpu.spec.verify import Windows, accept_chain
from aserve.gpu.step.future_map import FutureMap, RelayField
from aserve.gpu.step.resolve import DRAFTS
from aserve.messages.base import pack_i32
from aserve.messages.requests import AdmitRequest
from aserve_kernels.suffix_match import TORCH_SUFFIX_MATCH
from tests.fakes.drafters import Stumbling
from tests.fakes.hash_model import VOCAB, HashModel
from tests.fakes.toy_device import TOY
from tests.gpu.batch_builder import greedy
from tests.gpu.device_tables import CPU
from tests.gpu.drive import Served, make_executor, request, serve
from tests.gpu.frequencies import assert_frequencies, naive_probs
from tests.gpu.plain_engine import picking, plain_run

METHODS = (REJECTION, BLOCK)

# Two models in which each token depends on the one before it: logits [last token, next token].
SMALL_VOCAB, NUM_DRAFTS = 5, 3
_generator = torch.Generator().manual_seed(4)
TARGET = 1.3 * torch.randn(SMALL_VOCAB, SMALL_VOCAB, generator=_generator)
DRAFTER = TARGET + torch.randn(SMALL_VOCAB, SMALL_VOCAB, generator=_generator)


class Rows:
    """Many rows that differ in their seeds only, and decode without a scheduler."""

    def __init__(self, method: str, num: int, **sampling: Any) -> None:
        self.init = greedy(1, **{"temperature": 1.0, **sampling})
        self.tables = RowTables(max_rows=num, device=CPU)
        self.rows = torch.arange(1, num + 1)
        columns = init_columns([self.init], self.tables.shares)
        ints, floats = (torch.from_numpy(each).repeat(num, 1) for each in columns)
        ints[:, 0] = self.rows
        self.tables.write(self.rows, ints=ints, floats=floats)
        size = {"vocab_size": SMALL_VOCAB, "max_drafts": NUM_DRAFTS}
        self.verification = verification_of(method, **size, is_tree=False)
        fields = [RelayField(DRAFTS, (NUM_DRAFTS,), torch.int64)]
        self.draw = PLAIN_OPS.draw
        if self.verification is not None:
            fields += self.verification.fields
        self.relay = FutureMap(tuple(fields), max_rows=num, device=CPU)
        if self.verification is not None:
            self.draw = self.verification.sample_ops(PLAIN_OPS, self.relay).draw
        row_params = RowParams(1)
        row_params.write([self.init])
        ones = np.ones(num * (NUM_DRAFTS + 1), np.int32)
        self.plan = row_params.plan(ones, max_len=0, vocab_size=SMALL_VOCAB)
        self.lens = self.rows % 7  # KV lengths
        self.last = torch.zeros_like(self.rows)

    def step(self) -> tuple[Tensor, Tensor]:
        """One window of every row -> the tokens that it may give, [num, NUM_DRAFTS + 1], and how
        many of them it gives."""
        nodes = [self.last]
        for depth in range(1, NUM_DRAFTS + 1):
            nodes.append(self._draft(nodes[-1], depth))
        ids = torch.stack(nodes, dim=1)
        self.relay.write(DRAFTS, self.rows, ids[:, 1:])
        if self.verification is not None:
            window = torch.stack((self.lens, torch.full_like(self.lens, NUM_DRAFTS)), dim=1)
            self.relay.write(WINDOW, self.rows, window)
        places = torch.arange(NUM_DRAFTS + 1)
        lens = (self.lens[:, None] + 1 + places).flatten()
        of_rows = LogitsRows(self.rows.repeat_interleave(NUM_DRAFTS + 1), lens)
        drawn, _ = self.draw(TARGET[ids.flatten()], of_rows, self.tables, self.plan)
        is_real = torch.ones_like(ids, dtype=torch.bool)
        windows = Windows(self.rows, self.rows, is_real, ids, drawn.view_as(ids), None)
        accepted = accept_chain(windows)
        self.lens, self.last = self.lens + accepted.counts, accepted.last
        return accepted.tokens, accepted.counts

    def _draft(self, last: Tensor, depth: int) -> Tensor:
        drafting = DraftRows(
            iteration=1,
            rows=self.rows,
            lens=self.lens,
            roots=self.last,
            num_drafts=NUM_DRAFTS,
            max_len=0,
            needs_noise=True,
            counts=torch.full_like(self.lens, NUM_DRAFTS),
        )
        runner = SimpleNamespace(relay=self.relay, state=SimpleNamespace(tables=self.tables))
        return draw_drafts(cast(StepRunner, runner), DRAFTER[last], drafting, depth)

    def generate(self, num: int) -> Tensor:
        """The first `num` tokens of every row, [rows, num]."""
        found = torch.zeros(len(self.rows), num + NUM_DRAFTS + 1, dtype=torch.int64)
        num_found = torch.zeros_like(self.rows)
        while num_found.min() < num:
            tokens, counts = self.step()
            places = (num_found[:, None] + torch.arange(NUM_DRAFTS + 1)).clamp(
                max=found.shape[1] - 1
            )
            found.scatter_(1, places, tokens)
            num_found = (num_found + counts).clamp(max=num)
        return found[:, :num]


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.6},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.8},
    "filters": {"temperature": 1.4, "top_k": 4, "top_p": 0.8, "min_p": 0.1},
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("method", METHODS)
def test_b12_tokens_have_the_joint_distribution_of_the_target(method: str, name: str) -> None:
    rows = Rows(method, 30_000, **SETTINGS[name])
    tokens = rows.generate(3)
    weights = SMALL_VOCAB ** torch.arange(2, -1, -1)
    counts = np.bincount((tokens * weights).sum(dim=1).numpy(), minlength=SMALL_VOCAB**3)
    after = np.stack([naive_probs(each.double().numpy(), rows.init) for each in TARGET])
    every = itertools.product(range(SMALL_VOCAB), repeat=3)
    probs = np.array([after[0, a] * after[a, b] * after[b, c] for a, b, c in every])
    assert_frequencies(counts, probs)


def test_block_verification_accepts_more_than_rejection_and_that_more_than_coupling() -> None:
    lengths = {}
    for method in (COUPLED, *METHODS):
        _, counts = Rows(method, 20_000).step()
        lengths[method] = counts.double().mean()
    assert lengths[COUPLED] + 0.03 < lengths[REJECTION] < lengths[BLOCK] - 0.03, lengths


def test_the_first_draft_is_accepted_with_the_overlap_of_both_distributions() -> None:
    """That is the highest probability that any verification can reach."""
    num = 20_000
    _, counts = Rows(REJECTION, num).step()
    overlap = TARGET[0].softmax(dim=0).minimum(DRAFTER[0].softmax(dim=0)).sum().item()
    num_accepted = int((counts > 1).sum())
    assert abs(num_accepted - num * overlap) < 4 * (num * overlap * (1 - overlap)) ** 0.5


PROMPT = [(5 * i * i + 3 * i) % VOCAB for i in range(15)]
WARM: dict[str, Any] = {"temperature": 1.0, "seed": 5}
PICKY: dict[str, Any] = {
    "presence_penalty": 2.0,
    "frequency_penalty": 1.0,
    "top_k": 9,
    "min_p": 0.1,
}
ASKED = [
    request("greedy", PROMPT[:9], max_tokens=24),
    request("warm", PROMPT, max_tokens=17, **WARM),
    request("short", PROMPT[3:6], max_tokens=4, **WARM),
    request("picky", PROMPT[:2], max_tokens=15, logprobs=2, **PICKY, **WARM),
    request("end", PROMPT[:4], max_tokens=30, end_ids=(3, 8, 11), **WARM),
    request("grammar", PROMPT[:5], max_tokens=20, grammar=TOY, logprobs=0, **WARM),
    msgspec.structs.replace(
        request("predicted", PROMPT[:6], max_tokens=50, **WARM), prediction_ids=pack_i32(PROMPT * 3)
    ),
]


def run(
    asked: list[AdmitRequest], method: str, *, logits_at_a_time: int = 100, **options: Any
) -> Served:
    device = CpuDevice()
    device.logits_elements = logits_at_a_time * VOCAB
    drafter = Stumbling(3, flatness=0.5)
    verification = Verification(VOCAB, 3, is_block=method == BLOCK)
    mode = Predicted(drafter, TORCH_SUFFIX_MATCH, verification=verification)
    mode.num_forwards += drafter.max_drafts
    settings = {"mode": mode, "device": device, "attention": "torch-ref", **options}
    return serve(make_executor(HashModel(), **settings), asked, chaos=2)


@pytest.fixture(scope="module", params=METHODS)
def alone(request: pytest.FixtureRequest) -> tuple[str, Served]:
    """Each request alone, with every result awaited."""
    every = Served()
    for asked in ASKED:
        served = run([asked], request.param, depth=1, lead=1)
        every.outputs |= served.outputs
        every.logprobs |= served.logprobs
    return request.param, every


@pytest.mark.parametrize(
    "options",
    [
        {"depth": 1, "lead": 1, "page_size": 1, "num_pages": 400},
        {"depth": 2, "lead": 2, "page_size": 16, "num_pages": 40},
        {"depth": 3, "lead": 3, "max_batched_tokens": 27, "num_pages": 100},  # chunks
        {"depth": 3, "lead": 2, "max_rows": 2, "prefix_cache": False},
        {"logits_at_a_time": 6},
    ],
)
def test_b11_a_seeded_request_repeats_exactly(
    alone: tuple[str, Served], options: dict[str, Any]
) -> None:
    """Its tokens depend neither on its neighbours nor on the steps in flight."""
    method, expected = alone
    served = run(ASKED, method, **options)
    assert served.num_retracted == 0
    assert served.outputs == expected.outputs


def test_tokens_are_possible_and_have_their_logprobs(alone: tuple[str, Served]) -> None:
    """After penalties, filters and masks. Greedy tokens are those of plain decoding."""
    for asked in ASKED:
        key = asked.request_id, 0
        said = alone[1].outputs[key]
        plain = plain_run(HashModel(), asked, pick=picking(said))
        assert plain.tokens == said
        if asked.sampling.logprobs is not None:
            assert alone[1].logprobs[key] == pytest.approx(plain.logprobs, abs=1e-4)


def test_a_tree_is_refused() -> None:
    with pytest.raises(ConfigError, match="speculative-topk"):
        verification_of(BLOCK, vocab_size=VOCAB, max_drafts=4, is_tree=True)
    assert verification_of(COUPLED, vocab_size=VOCAB, max_drafts=4, is_tree=True) is None
