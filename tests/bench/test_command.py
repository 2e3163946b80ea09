"""`aserve bench`: what is listed, and what a user can mend."""

from __future__ import annotations

import pytest

from aserve.bench.catalog import BENCHES
from aserve.cli import main
from aserve.config import options_of


@pytest.mark.parametrize("name", sorted(BENCHES))
def test_help_shows_every_option_of_the_bench_with_its_text(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit) as end:
        main(["bench", name, "--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    for option in options_of(BENCHES[name].options):
        assert option.flag in shown
        assert option.about in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bench"], "BENCH"),
        (["bench", "nothing"], "nothing"),
        (["bench", "host-step", "--ros", "16"], "unknown option --ros; did you mean --rows?"),
        (["bench", "host-step", "--rows", "16,x"], "--rows 16,x: must be integers from 1"),
        (["bench", "host-step", "--rows", "0"], "--rows 0: must be integers from 1"),
        (["bench", "overlap-sim", "--step-ms", "2,0"], "--step-ms 2,0: must be numbers above 0"),
        (["bench", "host-step", "--steps", "0"], "--steps 0: must be an integer, 1 or more"),
    ],
)
def test_what_a_user_can_mend_is_one_line_and_exit_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert words in line
