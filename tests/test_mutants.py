"""The mutants break what is there, and name tests that exist."""

from __future__ import annotations

from tests.mutant_table import MUTANTS
from tests.mutants import ROOT


def test_every_mutant_names_one_line_of_its_file() -> None:
    counts = {
        mutant.name: (ROOT / mutant.file).read_text().count(mutant.line) for mutant in MUTANTS
    }
    assert set(counts.values()) == {1}, counts
    assert len(counts) == len(MUTANTS)


def test_every_mutant_names_a_test_that_exists() -> None:
    missing = []
    for mutant in MUTANTS:
        file, _, test = mutant.test.partition("::")
        if test not in (ROOT / file).read_text():
            missing.append(mutant.test)
    assert missing == []


def test_every_part_of_the_engine_is_broken_somewhere() -> None:
    """Scheduler, cache, executor, relay and text."""
    parts = {mutant.file.rsplit("/", 1)[0] for mutant in MUTANTS}
    assert parts >= {f"aserve/{part}" for part in ("scheduling", "cache", "gpu", "actors", "text")}
    assert len(MUTANTS) >= 40
