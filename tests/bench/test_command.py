"""`aserve bench`: what is listed, and what a user can mend."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from aserve.bench.catalog import BENCHES
from aserve.cli import main
from aserve.option import options_of
from tests.architecture.source import ROOT


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
        (["bench", "host-step", "--rows", "16,x"], "--rows 16,x: must be positive integers"),
        (["bench", "host-step", "--rows", "0"], "--rows 0: must be positive integers"),
        (["bench", "overlap-sim", "--processes", "1,3"], "--processes 1,3: must be 1, 2 or 1,2"),
        (["bench", "overlap-sim", "--step-ms", "2,0"], "--step-ms 2,0: must be positive numbers"),
        (["bench", "host-step", "--steps", "0"], "--steps 0: must be an integer, 1 or more"),
    ],
)
def test_a_user_error_is_one_line_and_exit_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert words in line


@pytest.mark.slow
def test_a_bench_computes_with_the_threads_and_the_spinning_of_a_server() -> None:
    """OpenMP reads both when torch is imported, so they are set before a bench's module is."""
    check = (
        "import os\nfrom aserve.cli import main\n"
        "main(['bench', 'relay', '--rows', '1', '--steps', '1', '--repeats', '1'])\n"
        "import torch\n"
        "assert torch.get_num_threads() == 1, torch.get_num_threads()\n"
        "assert os.environ['GOMP_SPINCOUNT'] == '10000'"
    )
    environment = dict(os.environ) | {"ASERVE_THREADS": "1"}
    environment.pop("OMP_NUM_THREADS", None)
    result = subprocess.run(
        [sys.executable, "-c", check],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
