"""The relay against a dictionary, and what its stamps are for: a wrong read fails the step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from aserve.errors import BugError
from aserve.gpu.step.future_map import LAST_TOKEN, SEQ_LEN, FutureMap, RelayField
from aserve.messages.results import StepFailed
from aserve.messages.step import RowInit
from tests.fakes.hash_model import HashModel
from tests.gpu.batch_builder import greedy, running
from tests.gpu.drive import make_executor

MAX_ROWS = 6
CPU = torch.device("cpu")
FIELDS = (RelayField(SEQ_LEN, (), torch.int64), RelayField("pair", (2,), torch.float64))
ROWS = st.lists(st.integers(1, MAX_ROWS), min_size=1, unique=True)


class RelayAgainstDictionary(RuleBasedStateMachine):
    """Rows join, sample, finish, are aborted or retracted, and get new tenants, in any order."""

    @initialize()
    def make(self) -> None:
        self.relay = FutureMap(FIELDS, max_rows=MAX_ROWS, device=CPU)
        self.tokens: dict[int, int] = {}
        self.lens: dict[int, int] = {}
        self.pairs: dict[int, list[float]] = {}
        self.stamps: dict[int, int] = {}
        self.iteration = 0

    @rule(rows=ROWS)
    def join(self, rows: list[int]) -> None:
        """The row may have been anybody's: finished, aborted or retracted."""
        self.relay.forget(torch.tensor(rows))
        self.stamps = {row: at for row, at in self.stamps.items() if row not in rows}

    @rule(rows=ROWS)
    def publish(self, rows: list[int]) -> None:
        values = [100 * self.iteration + row for row in rows]
        self.relay.publish(torch.tensor(rows), torch.tensor(values))
        self.lens |= zip(rows, values, strict=True)

    @rule(rows=ROWS, has_pair=st.booleans())
    def sample(self, rows: list[int], *, has_pair: bool) -> None:
        """A field that is not stashed keeps its value."""
        self.iteration += 1
        tokens = [1000 * self.iteration + row for row in rows]
        pairs = [[0.5 * token, -float(row)] for token, row in zip(tokens, rows, strict=True)]
        fields = {LAST_TOKEN: torch.tensor(tokens)}
        if has_pair:
            fields["pair"] = torch.tensor(pairs, dtype=torch.float64)
            self.pairs |= zip(rows, pairs, strict=True)
        self.relay.stash(torch.tensor(rows), fields, iteration=torch.tensor([self.iteration]))
        self.tokens |= zip(rows, tokens, strict=True)
        self.stamps |= dict.fromkeys(rows, self.iteration)

    @rule(ids=st.lists(st.integers(-MAX_ROWS, 5_000)))
    def read(self, ids: list[int]) -> None:
        resolved = self.relay.resolve(torch.tensor(ids, dtype=torch.int64))
        assert resolved.tolist() == [i if i >= 0 else self.tokens.get(-i, 0) for i in ids]
        rows = range(1, MAX_ROWS + 1)
        everybody = torch.tensor(rows)
        assert self.relay.read(SEQ_LEN, everybody).tolist() == [self.lens.get(r, 0) for r in rows]
        assert self.relay.read("pair", everybody).tolist() == [
            self.pairs.get(row, [0.0, 0.0]) for row in rows
        ]
        assert self.relay.written_iter.tolist() == [0, *(self.stamps.get(r, 0) for r in rows)]


RelayAgainstDictionary.TestCase.settings = settings(max_examples=40, stateful_step_count=15)
TestRelay = RelayAgainstDictionary.TestCase


def test_ids_of_no_row_stand_for_themselves_whatever_padding_wrote_into_row_0() -> None:
    relay = FutureMap((), max_rows=3, device=CPU)
    rows, tokens = torch.tensor([0, 1, 2, 3, 0]), torch.tensor([5, 7, 8, 9, 6])
    relay.stash(rows, {LAST_TOKEN: tokens}, iteration=torch.tensor([1]))
    ids = torch.tensor([0, 3, 4, 150_000, -3, 2**31 - 1])
    assert relay.resolve(ids).tolist() == [0, 3, 4, 150_000, 9, 2**31 - 1]


def test_what_was_read_does_not_change_with_the_next_stash() -> None:
    relay = FutureMap((), max_rows=3, device=CPU)
    rows = torch.tensor([2])
    relay.stash(rows, {LAST_TOKEN: torch.tensor([7])}, iteration=torch.tensor([1]))
    read, resolved = relay.read(LAST_TOKEN, rows), relay.resolve(-rows)
    relay.stash(rows, {LAST_TOKEN: torch.tensor([8])}, iteration=torch.tensor([2]))
    assert (read.tolist(), resolved.tolist()) == ([7], [7])


# ---------------------------------------------------------------- stamps, in a real step


def test_a_field_that_two_declare_is_refused() -> None:
    with pytest.raises(BugError, match="declared twice"):
        FutureMap((*FIELDS, FIELDS[0]), max_rows=1, device=CPU)


async def outcome_of(*steps: Step, expects: int) -> object:
    """The outcome of the last step, which expects the relay of that iteration."""
    executor = make_executor(HashModel())
    async with running(executor) as builder:
        for query_lens, sampling, inits in steps[:-1]:
            executor.launch(builder.batch(query_lens, sampling=sampling, inits=inits))
        query_lens, sampling, _ = steps[-1]
        builder.sampled_in[2] = expects
        return await executor.launch(builder.batch(query_lens, sampling=sampling))


Step = tuple[dict[int, list[int]], list[int], list[RowInit]]  # rows, which sample, new tenants
FIRST: Step = ({2: [5, 6]}, [2], [])
NEXT: Step = ({2: [-2]}, [2], [])


@pytest.mark.parametrize(
    ("steps", "written"),
    [
        pytest.param([FIRST, NEXT], 2, id="a later step has written"),
        pytest.param([({2: [5, 6]}, [], [])], 0, id="the row has never sampled"),
        pytest.param([FIRST, ({2: [9]}, [], [greedy(2)])], 0, id="a former tenant has written"),
    ],
)
async def test_a_wrong_relay_read_fails_its_step(steps: list[Step], written: int) -> None:
    outcome = await outcome_of(*steps, NEXT, expects=1)
    assert isinstance(outcome, StepFailed)
    assert outcome.error.code == "bug"
    says = f"row 2 reads the relay of step 1, but step {written} wrote it"
    assert says in outcome.error.message
