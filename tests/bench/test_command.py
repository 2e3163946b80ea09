"""`aserve bench` as a user runs it: small loads, what is listed, and what a user can mend."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from aserve.bench import kernel_cases
from aserve.bench.catalog import BENCHES
from aserve.bench.kernels import measure, run
from aserve.bench.options import KernelsOptions
from aserve.cli import main
from aserve.config import Facts, Raw, resolve
from aserve.options.option import options_of
from aserve.tiny import MODEL_DIR
from tests.architecture.source import ROOT
from tests.bench.last_line import Captured, figures_of
from tools.train_models.folder import MODELS_DIR, complete_folder

OFFLINE = ("offline", "--num-prompts", "3", "--input-len", "20", "--output-len", "4")


@pytest.mark.parametrize("name", sorted(BENCHES))
def test_help_shows_every_option_of_the_bench_with_its_text(
    name: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
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
        ("", "BENCH"),
        ("nothing", "nothing"),
        ("host-step --ros 16", "unknown option --ros; did you mean --rows?"),
        ("host-step --rows 16,x", "--rows 16,x: must be positive integers"),
        ("speculate", "--algorithms : must be among"),
        ("verify", "name the drafter of the windows with --speculative-algorithm"),
        ("host-step --steps 0", "--steps 0: must be an integer, 1 or more"),
        ("overlap-sim --processes 1,3", "--processes 1,3: must be 1, 2 or 1,2"),
        ("overlap-sim --step-ms 2,0", "--step-ms 2,0: must be positive numbers"),
        (
            "offline --preset peers --scenario b2",
            "--scenario b2: must be among b1, b8, b32, prefill",
        ),
        (
            "offline --preset peers",
            "prefill needs 2049 tokens, but the model's context has 1024",
        ),
        ("offline --num-pages 4 --input-len 100", "pages"),
        ("route --other http://127.0.0.1:9", "--other needs --other-pid"),
        ("report --results missing.json", "--results missing.json"),
        ("disagg --beside noise", "--beside: 'noise' is none of nothing, memory, prompts"),
    ],
)
def test_a_user_error_is_one_line_and_exit_code_2(
    arguments: str, words: str, capsys: Captured
) -> None:
    assert main(["bench", *arguments.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


# A server in two processes shows what one in this process does, but for how it is launched.
PROCESSES = "1,2" if os.environ.get("ASERVE_TEST_PROFILE") == "large" else "2"
SMALL_RUNS = {
    "disagg": ("--transfer-mib", "4", "--repeats", "1", "--prompts", "0"),
    "grouped": (
        *("--tokens", "1,3", "--experts", "4", "--top-k", "2", "--hidden", "16"),
        *("--intermediate", "32", "--repeats", "2", "--dtype", "float32"),
    ),
    "host-step": ("--rows", "4,8", "--steps", "20", "--repeats", "2"),
    "http-cost": ("--clients", "2", "--steps", "100", "--step-ms", "1"),
    "relay": ("--rows", "2", "--steps", "5", "--repeats", "2"),
    "request-memory": ("--running", "3", "--waiting", "4"),
    "route": ("--requests", "4", "--streams", "2", "--chunks", "5", "--groups", "0"),
    "overlap-sim": ("--rows", "2", "--steps", "4", "--step-ms", "1", "--processes", PROCESSES),
    "one-batch": ("--batch-sizes", "1,3", "--input-lens", "20", "--output-len", "4"),
    "speculate": (
        *("--algorithms", "NGRAM", "--rows", "1,2", "--output-len", "20", "--repeats", "1"),
        *("--task", "code"),
    ),
    "verify": (
        *("--speculative-algorithm", "NGRAM", "--rows", "1,2", "--output-len", "20"),
        *("--repeats", "1"),
    ),
}
SERIES = {
    "disagg": "rates",
    "grouped": "us",
    "host-step": "rows",
    "http-cost": "engine_us_per_token",
    "relay": "idle",
    "request-memory": "waiting_bytes",
    "route": "requests_per_s",
    "overlap-sim": "busy_two_processes",
    "one-batch": "batches",
    "speculate": "batches",
    "verify": "batches",
}


@pytest.mark.slow
@pytest.mark.parametrize("bench", SMALL_RUNS)
def test_a_small_run_ends_with_its_figures(bench: str, capsys: Captured) -> None:
    figures = figures_of(capsys, bench, *SMALL_RUNS[bench])
    assert figures[SERIES[bench]]
    assert figures.get("cached_tokens", 0) == 0
    assert figures["machine"]["versions"].keys() >= {"aserve", "python", "torch"}


@pytest.mark.slow
def test_streams_beside_long_prompts_end_in_time(capsys: Captured) -> None:
    """Steps sleep, so no stream comes to its last token."""
    sizes = ("--transfer-mib", "4", "--repeats", "1", "--prompts", "1", "--prompt-len", "40")
    case = ("--servers", "two", "--turns", "1", "--sleep-ms", "20", "--seconds", "1.5")
    figures = figures_of(capsys, "disagg", *sizes, *case)
    itls, [loop] = figures["itls"], figures["loops"]
    assert 5 < loop["ms"] < 200
    assert 500 < loop["rounds"] * loop["ms"] < 3000
    assert loop["p99"] >= 1
    assert [each["beside"] for each in itls] == ["nothing", "memory", "prompts"]
    assert [each["prompts"] > 0 for each in itls] == [False, False, True]
    for each in itls:
        assert 0 < each["tokens"] < 4 * 400
        assert each["server_ms"] > 20 < each["client_ms"]


def test_an_offline_load_counts_requests_times_tokens_and_nothing_comes_from_the_cache(
    capsys: Captured, tmp_path: Path
) -> None:
    """Random weights do where there is no checkpoint; requests begin at a rate."""
    shutil.copy(MODEL_DIR / "config.json", tmp_path)
    dummy = ("--model", str(tmp_path), "--load-format", "dummy", "--num-pages", "64")
    rate = ("--request-rate", "1000", "--repeats", "2", "--max-concurrency", "2")
    figures = figures_of(capsys, *OFFLINE, *dummy, *rate)
    for one in figures["runs"]:
        assert (one["completed"], one["failed"]) == (3, 0)
        assert (one["total_input_tokens"], one["total_output_tokens"]) == (3 * 20, 3 * 4)
        assert one["tokens_per_decode"] == 1
    assert figures["cached_tokens"] == 0
    assert figures["output_throughput"] > 0


@pytest.mark.slow
def test_an_offline_load_counts_the_tokens_of_a_pass_over_a_block(
    capsys: Captured, tmp_path: Path
) -> None:
    """Every pass counts. A threshold of 0 fills each block of 8 tokens in one pass."""
    folder = complete_folder(MODELS_DIR / "dllm", tmp_path / "dllm")
    settings = tmp_path / "settings.yaml"
    settings.write_text("threshold: 0\n")
    load = ("offline", "--num-prompts", "3", "--input-len", "16", "--output-len", "80")
    options = ("--model", str(folder), "--dllm-algorithm-config", str(settings))
    figures = figures_of(capsys, *load, *options, "--repeats", "1")
    assert figures["total_output_tokens"] == 3 * 80
    assert figures["tokens_per_decode"] == 8


@pytest.mark.slow
def test_every_curve_of_scaling_has_its_sizes_and_a_picture(
    capsys: Captured, tmp_path: Path
) -> None:
    """A context that has no room is left out; a picture has a line for every result."""
    sizes = ("--contexts", "16,40,5000", "--prefills", "32", "--rows", "2,4")
    figures = figures_of(capsys, "scaling", *sizes, "--steps", "2", "--repeats", "1")
    curves = figures["curves"]
    assert list(curves) == ["decode", "prefill", "host-step", "start", "memory"]
    assert [list(curves[name]) for name in ("decode", "prefill")] == [["16", "40"], ["32"]]
    assert figures["left_out"] == [5000]
    assert all(value > 0 for curve in curves.values() for value in curve.values())
    result, out = tmp_path / "scaling.txt", tmp_path / "pictures"
    result.write_text("a table\n" + json.dumps(figures) + "\n")
    both = ("--results", f"{result},{result}", "--labels", "old,new", "--out", str(out))
    pictures = figures_of(capsys, "report", *both)["pictures"]
    assert pictures == {name: str(out / f"{name}.svg") for name in curves}
    for path in pictures.values():
        lines = ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}polyline")
        assert len(list(lines)) == 2


def test_every_kernel_is_compared_with_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter: the figures are those of the CPU, and mean nothing."""
    sizes = kernel_cases.Sizes
    small = {"hidden": 64, "intermediate": 48, "heads": 4, "kv_heads": 2, "head_dim": 16}
    small["vocab"] = 100
    monkeypatch.setattr(kernel_cases, "Sizes", lambda *given: sizes(*given, **small))
    monkeypatch.setattr("aserve.bench.device_rates.TRIES", 1)
    monkeypatch.setattr("aserve.bench.device_rates.WARM_UPS", 0)
    options = KernelsOptions(tokens=3, rows=2, context_len=20)
    figures = measure(options, torch.device("cpu"), copy_bytes=1 << 20).figures["kernels"]
    assert isinstance(figures, dict)
    assert list(figures) == list(kernel_cases.CASES)
    assert all(one["us"] > 0 for one in figures.values())


@pytest.mark.gpu
def test_kernels_are_measured_on_the_device() -> None:
    resolved = resolve(Raw(command_line={}), Facts(default_model="none"))
    figures = run(KernelsOptions(tokens=4096, rows=64), resolved).figures
    assert set(figures) == {"kernels", "copy_gb_per_s"}


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
    command = [sys.executable, "-c", check]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
