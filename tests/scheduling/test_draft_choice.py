"""Rows draft where it pays, as far as the measured times and the accepted drafts tell."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from aserve.messages.base import pack_i32
from aserve.messages.executor import DecodeCaps
from aserve.messages.results import StepTimes
from aserve.messages.step import DraftTree, StepStats
from aserve.scheduling.draft_choice import (
    LOOK_DISTANCE,
    PROBE_STEPS,
    TRIAL_DISTANCE,
    DraftChoice,
)
from aserve.scheduling.flights import Step
from aserve.scheduling.ngram_matches import LENGTHS, MOST_MISALIGNED, match_level, match_levels
from aserve.scheduling.rows import Column, RowTable
from aserve.scheduling.step_times import MIN_GAIN, WindowTimes, expected
from aserve.scheduling.token_log import TokenLog
from tests.scheduling.stage import Stage, request, result, spec

COUNTS = (1, 4, 16, 64)
PLAIN = (1.1, 1.3, 2.2, 6.2)
Chance = Callable[[int, int], float]  # of acceptance, by row and number of tokens


def step_times(num_drafts: int, cost: float, *, followed: float = 1.2) -> StepTimes:
    """The first row that drafts costs 0.3 of what all do."""
    first = followed + 0.3 * (cost - followed)
    windows, firsts = ({0: followed, num_drafts: cost}, {num_drafts: first})
    return StepTimes(
        COUNTS,
        PLAIN,
        *(
            {num: tuple(factor * t for t in PLAIN) for num, factor in factors.items()}
            for factors in (windows, firsts)
        ),
    )


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_the_best_of_all_subsets_and_lengths(seed: int) -> None:
    chance = random.Random(seed)
    num, tree = chance.randint(1, 5), DraftTree(max_depth=3) if seed % 2 else None
    plain, more = np.sort([[chance.uniform(1, 9) for _ in range(5)] for _ in range(2)])
    windows = {0: plain + 0.1, 2: plain + more / 4, 4: plain + more}
    firsts = {4: plain + 0.1 + 0.4 * more} if seed % 3 else {}
    given = StepTimes(
        (1, 2, 3, 4, 5),
        tuple(plain),
        *({k: tuple(v) for k, v in times.items()} for times in (windows, firsts)),
    )
    times = WindowTimes(given, max_rows=5, tree=tree)
    chances = np.array([chance.random() for _ in range(num)])

    def rate(chosen: tuple[int, ...], length: int) -> float:
        """The mean time per token of all rows, over that of plain decoding."""
        depth = length if tree is None else tree.depth(length)
        gains = [sum(chances[row] ** k for k in range(1, depth + 1)) for row in chosen]
        price = times.price(num, num_drafting=len(chosen), num_drafts=length)
        mean = sum([1 / (1 + gain) for gain in gains], num - len(chosen)) / num
        return float(plain[num - 1] / (plain[num - 1] + price) / mean)

    best = 1.0
    for count, length in itertools.product(range(1, num + 1), (2, 4)):
        rates = (rate(rows, length) for rows in itertools.combinations(range(num), count))
        best = max(best, *rates)
    found = times.best(chances)
    assert found.gain == pytest.approx(best if best > MIN_GAIN else 1)
    if len(found.indices):
        assert rate(tuple(found.indices), found.num_drafts) == pytest.approx(best)


def test_times_between_and_behind_the_measured_numbers_of_rows_follow_their_line() -> None:
    times = WindowTimes(step_times(4, 3.0), max_rows=128, tree=None)
    assert times.plain[[1, 10, 64, 128]] == pytest.approx([1.1, 1.75, 6.2, 6.2 + 64 * 4 / 48])
    assert times.price(10, num_drafting=10, num_drafts=3) == pytest.approx(2 * 1.75)
    assert times.price(10, num_drafting=1, num_drafts=4) == pytest.approx(0.74 * 1.75)
    between = 0.74 + (2 - 0.74) / 3
    assert times.price(10, num_drafting=4, num_drafts=4) == pytest.approx(between * 1.75)
    assert times.price(10, num_drafting=0, num_drafts=0) == pytest.approx(0.2 * 1.75)


class Simulation:
    """Steps of rows whose drafts are accepted by chance, and whose times are as measured. A row
    that has `answer_len` tokens makes way for a new one. `slowness`: of windows, over what was
    measured."""

    def __init__(
        self, times: StepTimes, num_rows: int, *, answer_len: int = 200, slowness: float = 1.0
    ) -> None:
        self.slowness = slowness
        self.iteration = 0
        self.num_drafts = max(times.window_us)
        caps = DecodeCaps(max_tokens_per_step=self.num_drafts + 1)
        self.choice = DraftChoice(caps)
        self.choice.set_times(times, max_rows=64)
        self.times = WindowTimes(times, max_rows=64, tree=None)
        self.table = RowTable(64)
        self.rows = np.arange(1, num_rows + 1)
        self.answer_len = answer_len
        self.random = random.Random(num_rows)
        self.took = 0.0
        self.num_tokens = self.num_windows = 0
        self.mean_gain = 1.0
        self._enter(self.rows)

    def _enter(self, rows: Column) -> None:
        """A step computes their prompts, and one token of each other row."""
        self.table._values[:, rows] = 0
        self.table.max_step_tokens[rows] = self.num_drafts + 1
        self.table.remaining[rows] = 9
        self.choice.choose(self.table, np.setdiff1d(self.rows, rows), {})
        self._launch(np.zeros_like(self.rows), has_prefill=True)
        self.table.remaining[rows] = 1

    def _launch(self, num_drafts: Column, *, has_prefill: bool) -> bool:
        none = np.zeros_like(self.rows)
        self.iteration += 1
        nobody, samples = np.empty(0, np.object_), none == 0
        step = Step(self.iteration, nobody, self.rows, none, num_drafts, none, none, none, samples)
        stats = StepStats(num_prefill_rows=int(has_prefill))
        return self.choice.note_launch(self.table, step, stats)

    def run_batch(self, num_tokens: int, chance: Chance) -> float:
        """Returns the same for rows that begin together, until the last one has ended. Then
        `mean_gain` is that of the mean time until a row has ended."""
        self.took, all_rows, total = 0.0, self.rows, 0.0
        self.answer_len = 2 * num_tokens + self.num_drafts  # no row makes way
        self._enter(all_rows)
        while len(self.rows):
            total += len(self.rows) * -self.took
            self._step(chance)
            total += len(self.rows) * self.took
            self.rows = self.rows[self.table.num_tokens[self.rows] < num_tokens]
        self.rows, plain = all_rows, num_tokens * float(self.times.plain[len(all_rows)])
        self.mean_gain = plain * len(all_rows) / total
        return plain / self.took

    def run(self, num_steps: int, chance: Chance) -> float:
        """Returns the speed over that of plain decoding in these steps."""
        self.took, self.num_tokens = 0.0, 0
        for _ in range(num_steps):
            self._step(chance)
        plain = float(self.times.plain[len(self.rows)]) * self.num_tokens / len(self.rows)
        return plain / self.took

    def _step(self, chance: Chance) -> None:
        table, rows = self.table, self.rows
        self.choice.choose(table, rows, {})
        may_draft = table.num_skipped[rows] == 0
        num_drafts = np.where(may_draft, self.num_drafts - table.num_cut[rows], 0)
        skips = self._launch(num_drafts, has_prefill=False)
        assert not (skips and num_drafts.any())
        num_drafting = int(np.count_nonzero(num_drafts))
        self.num_windows += num_drafting
        took = float(self.times.plain[len(rows)])
        if not skips:
            most = int(num_drafts.max())
            took += self.times.price(len(rows), num_drafting=num_drafting, num_drafts=most)
        took *= self.slowness if num_drafting else 1
        self.took += took
        self.choice.note_time(self.iteration, took * 3)  # everything is slower than measured
        outputs = [
            self._outputs(chance(row, int(table.num_tokens[row])), num)
            for row, num in zip(rows.tolist(), num_drafts.tolist(), strict=True)
        ]
        self.num_tokens += sum(outputs)
        table.num_tokens[rows] += outputs
        counts = np.array(outputs, np.int32)
        self.choice.note_results(table, rows, num_drafts, counts)
        if len(ended := rows[table.num_tokens[rows] >= self.answer_len]):
            self._enter(ended)

    def _outputs(self, chance: float, num_drafts: int) -> int:
        for count in range(num_drafts):
            if self.random.random() >= chance:
                return count + 1
        return num_drafts + 1


@pytest.mark.parametrize("num_rows", [1, 16])
@pytest.mark.parametrize("chance", [0.0, 0.8, 0.95])
@pytest.mark.parametrize("cost", [1.2, 2.0, 3.5, 4.8, 8.0])
def test_speculation_loses_hardly_anything_and_gains_what_it_can(
    cost: float, chance: float, num_rows: int
) -> None:
    simulation = Simulation(step_times(4, cost), num_rows)
    simulation.run(100, lambda _row, _num: chance)  # what the account has at first may be spent
    gain = simulation.run(400, lambda _row, _num: chance)
    assert gain > 0.97
    best = (1 + float(expected(np.array([chance]), 4)[0])) / cost
    assert gain > 0.97 * best or best < MIN_GAIN
    assert simulation.num_windows or cost > 4.5  # where nothing can be gained, nothing is tried


@pytest.mark.parametrize("num_rows", [4, 16])
@pytest.mark.parametrize("plain", [PLAIN, (1.0, 1.0, 1.02, 1.1), (0.35, 0.6, 1.6, 5.8)])
@pytest.mark.parametrize(
    ("factors", "num_drafts"),
    [((1.3, 2.9, 5.5, 7.1), 7), ((1.7, 2.1, 2.8, 4.6), 4), ((1.2, 1.2, 1.3, 2.0), 4)],
)
def test_no_batch_is_slower_than_with_plain_decoding(
    factors: tuple[float, ...], num_drafts: int, plain: tuple[float, ...], num_rows: int
) -> None:
    """All rows wait for the windows of some, and the last of rows that are alike for its luck."""
    plain = tuple(1e3 * time for time in plain)
    windows = tuple(factor * time for factor, time in zip(factors, plain, strict=True))
    followed = tuple(1.1 * time for time in plain)
    firsts = tuple(0.95 * time + 0.05 * all_ for time, all_ in zip(followed, windows, strict=True))
    times = StepTimes(COUNTS, plain, {0: followed, num_drafts: windows}, {num_drafts: firsts})
    chances: dict[str, Chance] = {
        "few": lambda _row, _num: 0.6,
        "most": lambda _row, _num: 0.95,
        "every second row": lambda row, _num: 0.95 * (row % 2),
        "any": lambda row, _num: row * 0.618 % 1,
    }
    for name, chance in chances.items():
        simulation = Simulation(times, num_rows)
        simulation.run_batch(100, chance)  # what the account has at first may be spent
        gains = [(simulation.run_batch(100, chance), simulation.mean_gain) for _ in range(3)]
        until_last, until_each = np.mean(gains, axis=0)
        assert until_each > 0.97, name
        assert until_last > 0.965 or name in ("every second row", "any"), name


@pytest.mark.parametrize("num_rows", [1, 16])
@pytest.mark.parametrize(("slowness", "gain"), [(3.0, 0.97), (0.5, 2.2)])
def test_times_that_were_measured_wrongly_are_corrected_by_the_steps(
    num_rows: int, slowness: float, gain: float
) -> None:
    simulation = Simulation(step_times(4, 2.4), num_rows, slowness=slowness)
    simulation.run(200, lambda _row, _num: 0.8)
    assert simulation.run(1000, lambda _row, _num: 0.8) > gain


@pytest.mark.parametrize("num_rows", [1, 4])
def test_drafting_outlasts_first_windows_that_were_slow_and_rejected(num_rows: int) -> None:
    simulation = Simulation(step_times(4, 1.5), num_rows, slowness=3.0)
    simulation.run(3, lambda _row, _num: 0.0)
    simulation.slowness = 1.0
    assert simulation.run(40, lambda _row, _num: 0.9) > 1.8


@pytest.mark.parametrize("num_rows", [1, 16])
def test_attempts_in_vain_become_rarer_for_new_rows_too(
    num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row makes way for a new one soon. Choices take time as well, which is not simulated."""
    num_choices = 0
    choose = DraftChoice._choose_anew

    def counted(self: DraftChoice, *given: Any) -> None:
        nonlocal num_choices
        num_choices += 1
        choose(self, *given)

    monkeypatch.setattr(DraftChoice, "_choose_anew", counted)
    simulation = Simulation(step_times(4, 1.3), num_rows, answer_len=100)
    simulation.run(300, lambda _row, _num: 0.0)
    num_windows, num_choices = simulation.num_windows, 0
    assert simulation.run(1000, lambda _row, _num: 0.0) > 0.994
    assert 3 * num_rows <= simulation.num_windows - num_windows <= 15 * num_rows
    assert num_choices <= 25
    simulation.run(400, lambda _row, _num: 0.95)
    assert simulation.run(100, lambda _row, _num: 0.95) > 3


def test_rows_whose_text_changes_stop_and_begin_again() -> None:
    simulation = Simulation(step_times(4, 1.5), 16, answer_len=10_000)
    assert simulation.run(200, lambda _row, _num: 0.95) > 2.1
    assert simulation.run(300, lambda row, _num: 0.95 * (row % 2)) > 1.2
    assert simulation.run(300, lambda _row, _num: 0.0) > 0.94
    assert simulation.run(1000, lambda _row, _num: 0.0) > 0.98
    simulation.run(1500, lambda _row, _num: 0.95)  # the account grows slowly
    assert simulation.run(300, lambda _row, _num: 0.95) > 1.5


@pytest.mark.parametrize(("num_bad", "num_cut"), [(4, 0), (14, 4)])
def test_rows_that_accept_draft_unless_their_neighbours_lose_more_by_waiting(
    num_bad: int, num_cut: int
) -> None:
    simulation = Simulation(step_times(4, 2.0, followed=1.0), 16, answer_len=10_000)
    simulation.run(200, lambda row, _num: 0.95 * (row > num_bad))
    cut = simulation.table.num_cut[simulation.rows].tolist()
    assert cut[num_bad:] == [num_cut] * (16 - num_bad)
    assert cut[:num_bad].count(4) >= num_bad - 1  # one may try windows


@pytest.mark.parametrize("seed", range(30))
def test_the_level_of_a_match_is_that_of_the_longest_suffix_that_occurred_before(seed: int) -> None:
    chance = random.Random(seed)
    few = chance.choice([(0, 1, 256, 65536, 1 << 24), (1, 2), range(30)])  # bytes across tokens
    tokens = chance.choices(few, k=chance.randint(1, 60))
    before = [tokens[:stop] for stop in range(len(tokens))]
    lengths = [
        length
        for length in range(1, len(tokens))
        if any(part[-length:] == tokens[-length:] for part in before if len(part) >= length)
    ]
    longest = max(lengths, default=0)
    log = TokenLog(pack_i32(tokens[:7]), pack_i32(tokens[7:]))
    assert match_levels([log, log]) == [sum(longest >= least for least in LENGTHS)] * 2


def test_a_search_for_a_match_ends_however_often_bytes_match_across_tokens() -> None:
    across = [1, 0, 0, 256]  # holds the bytes of three zeros, and not the tokens
    for num_across, level in ((MOST_MISALIGNED - 1, 1), (MOST_MISALIGNED + 1, 0)):
        tokens = [0, 0, 0, *across * num_across, 9, 0, 0, 0]
        assert match_level(pack_i32(tokens)) == level


def test_rows_that_repeat_themselves_draft_and_others_try_nothing() -> None:
    caps = DecodeCaps(max_tokens_per_step=8, continues_repeats=True)
    choice, table, rows = DraftChoice(caps), RowTable(4), np.array([1, 2])
    choice.set_times(step_times(7, 2.0), max_rows=4)
    table.max_step_tokens[rows], table.next_attempt[rows] = 8, 100
    texts = {1: [*range(20, 30), *range(20, 28)], 2: [5, 6, 7, 8, 5, 6]}
    running: Any = {
        row: SimpleNamespace(tokens=TokenLog(pack_i32(text), b"")) for row, text in texts.items()
    }
    for _ in range(2):  # the first time is a probe of plain steps
        choice._hold = 0
        choice.choose(table, rows, running)
    assert table.num_cut[rows].tolist() == [0, 7]
    running[1].tokens.outputs.append(9)
    choice.note_results(table, rows, np.array([7, 0]), np.array([1, 1], np.int32))
    choice.choose(table, rows, running)  # at once, because the drafts were rejected
    assert table.num_cut[rows].tolist() == [7, 7]


class LookingRow:
    """One row of a drafter that continues texts. `answers`: whether its drafts are right."""

    def __init__(self, *, answers: bool) -> None:
        self.choice = DraftChoice(DecodeCaps(max_tokens_per_step=8, continues_repeats=True))
        self.choice.set_times(step_times(7, 1.5), max_rows=4)
        self.table, self.rows, self.answers = RowTable(4), np.array([1]), answers
        self.table.max_step_tokens[1] = 8
        self.table.remaining[1] = 1
        self.log = TokenLog(pack_i32([*range(12)]), b"")
        self.num_steps = 0

    def step(self, token: int) -> int:
        """Returns the drafts of a step after which the text has this token."""
        table, rows, none = self.table, self.rows, np.zeros(1, np.int64)
        running: Any = {1: SimpleNamespace(tokens=self.log)}
        self.choice.choose(table, rows, running)
        num_drafts = 7 - table.num_cut[rows]
        self.num_steps += 1
        nobody, samples = np.empty(0, np.object_), none == 0
        step = Step(self.num_steps, nobody, rows, none, num_drafts, none, none, none, samples)
        self.choice.note_launch(table, step, StepStats())
        self.log.outputs.append(token)
        num_outputs = np.array([8 if self.answers and num_drafts else 1], np.int32)
        self.choice.note_results(table, rows, num_drafts, num_outputs)
        return int(num_drafts[0])


def test_a_row_that_begins_to_repeat_itself_drafts_after_a_few_steps() -> None:
    row = LookingRow(answers=True)
    assert not any(row.step(100 + place) for place in range(150))
    assert any(row.step(100 + place) for place in range(LENGTHS[0] + LOOK_DISTANCE + PROBE_STEPS))


@pytest.mark.parametrize(("answers", "num_windows"), [(False, 3), (True, 1200)])
def test_rows_without_matches_try_few_windows_until_one_finds_what_others_said(
    answers: bool, num_windows: int
) -> None:
    row = LookingRow(answers=answers)
    drafts = [row.step(100 + place) for place in range(3 * TRIAL_DISTANCE + 300)]
    assert not any(drafts[:TRIAL_DISTANCE])
    found = np.count_nonzero(drafts)
    assert found >= num_windows if answers else found == num_windows


def test_a_row_that_begins_with_a_decode_drafts_only_once_a_choice_names_it() -> None:
    """Its prompt is one token, and the choice that its former request has left still holds."""
    caps = DecodeCaps(max_tokens_per_step=3, continues_repeats=True)
    stage = Stage(msgspec.structs.replace(spec(depth=1, lead=1, max_rows=1), decode=caps))
    stage.play(StepTimes((1, 5), (1.0, 2.0), {0: (1.1, 2.2), 2: (2.85, 5.7)}, {}))
    for name in ("a", "b"):
        stage.play(request(name, [7], max_tokens=4))
        for token in (50, 51, 52, 53):
            [batch] = stage.batches
            assert batch.verify is None
            stage.play(result(batch.iteration, {1: [token]}))
        assert stage.batches == []


def test_windows_that_decide_about_tokens_depend_on_no_times() -> None:
    for is_whole in (False, True):
        choice = DraftChoice(DecodeCaps(max_tokens_per_step=5, whole_windows=is_whole))
        choice.set_times(step_times(4, cost=9.0), max_rows=64)
        assert choice.is_on != is_whole
