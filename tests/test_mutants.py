"""The mutants break what is there."""

from tests.mutants import MUTANTS, ROOT


def test_every_mutant_names_one_line_of_its_file() -> None:
    counts = {
        mutant.name: (ROOT / mutant.file).read_text().count(mutant.line) for mutant in MUTANTS
    }
    assert set(counts.values()) == {1}, counts
