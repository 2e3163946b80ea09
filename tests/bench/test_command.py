"""`aserve bench` as a user runs it: small loads, what is listed, and what a user can mend."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from aserve.bench import kernel_cases, serve
from aserve.bench.catalog import BENCHES
from aserve.bench.kernels import measure, run
from aserve.bench.options import KernelsOptions
from aserve.bench.streamed import Answer
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
        ("one-batch --batch-sizes 1,100000", "100000 is more than 65536"),
        (
            "offline --scenario b8",
            "--scenario b8: it chooses from a preset, so give --preset as well",
        ),
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
        ("report --results /dev/null", "not the output of bench scaling: Input data was truncated"),
        ("disagg --beside noise", "--beside: 'noise' is none of nothing, memory, prompts"),
        ("disagg --transports pigeon", "--transports: 'pigeon' is none of tcp, shm, nixl"),
        ("grouped --experts 4 --top-k 5", "--top-k 5: there are 4 --experts"),
        (
            "grouped --dtype float32 --experts 1000000 --hidden 100000 --intermediate 100000",
            "bench grouped does not fit in memory; choose smaller numbers",
        ),
        ("fairness --step-ms inf", "--step-ms inf: must be a number from 0.1 to 60000"),
        ("overlap-sim --step-ms inf", "--step-ms inf: must be positive numbers"),
        ("overlap-sim --step-ms nan", "--step-ms nan: must be positive numbers"),
        ("hostile --size 1", "--size 1: must be an integer, 1048576 or more"),
        ("serve --goodput ttft:x", "--goodput ttft:x: must be NAME:MILLISECONDS"),
    ],
)
def test_a_user_error_is_one_line_and_exit_code_2(
    arguments: str, words: str, capsys: Captured
) -> None:
    assert main(["bench", *arguments.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--batch-sizes 1,60000", "takes 600000 pages, and the KV cache has"),
        ("--input-lens 1000", "takes 1032 tokens of a row, and the context has 1024"),
    ],
)
def test_a_batch_that_is_larger_than_the_engine_is_refused_before_any_is_measured(
    arguments: str, words: str, capsys: Captured, tmp_path: Path
) -> None:
    """Its rows took turns, for minutes."""
    limits = tmp_path / "limits.json"
    limits.write_text('{"read_GBps": 1, "matmul_GFLOPs": 1}')
    assert main(["bench", "one-batch", *arguments.split(), "--limits", str(limits)]) == 2
    assert words in capsys.readouterr().err


def test_products_that_the_processor_cannot_compute_are_refused(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    assert main(["bench", "grouped"]) == 2
    assert "--dtype bfloat16: oneDNN needs AVX-512" in capsys.readouterr().err


@pytest.mark.parametrize("num_repeats", [0, 2])
def test_ctrl_c_in_a_load_keeps_the_repeats_that_have_ended(
    num_repeats: int, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = iter(range(num_repeats))

    async def load(sends: Sequence[object], *_: object, **__: object) -> tuple[list[Answer], float]:
        if next(ended, None) is None:
            raise KeyboardInterrupt
        answer = Answer(ttft_s=0.1, e2el_s=0.5, itls_s=[0.1] * 4, completion_tokens=5)
        return [answer] * len(sends), 2.0

    monkeypatch.setattr(serve, "run_load", load)
    arguments = ("--model", "m", "--num-warmups", "0", "--num-prompts", "4", "--repeats", "3")
    assert main(["bench", "serve", *arguments]) == 130
    lines = capsys.readouterr().out.splitlines()
    if not num_repeats:
        assert lines == []
        return
    figures = json.loads(lines[-1])
    assert [run["output_throughput"] for run in figures["runs"]] == [10.0, 10.0]


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


MACHINE = {"cpu": "x", "cores": 1, "flags": [], "versions": {}, "date": ""}
FIGURES = json.dumps({"curves": {"decode": {"1": 2}}, "machine": MACHINE})


@pytest.mark.parametrize(
    ("option", "text", "out", "words"),
    [
        ("--results", FIGURES, "figures", "figures: cannot be written: File exists"),
        (
            "--comparison",
            '{"title": "t", "panels": [{"title": "p", "setting": "", "bars": {"a": [0, 0]}}]}',
            "pictures",
            "not a comparison of engines: the panel 'p' has no figure above 0",
        ),
    ],
)
def test_pictures_that_cannot_be_drawn_or_written_are_one_line(
    option: str, text: str, out: str, words: str, tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "figures").write_text(text)
    given = (option, str(tmp_path / "figures"), "--out", str(tmp_path / out))
    assert main(["bench", "report", *given]) == 2
    assert words in capsys.readouterr().err


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
