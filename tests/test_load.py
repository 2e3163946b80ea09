"""What the command line says reaches the engine that is built."""

from __future__ import annotations

from pathlib import Path

import pytest

from aserve.cli import make_parser
from aserve.config import Facts, Raw, resolve
from aserve.gpu.executor import TorchExecutor
from aserve.load import build_options, load_executor
from aserve.tiny.location import MODEL_DIR


@pytest.mark.parametrize(
    ("words", "graph_rows"),
    [
        ([], None),
        (["--cuda-graph-max-bs", "48"], 48),
        (["--eager"], 0),
        (["--enforce-eager"], 0),
        (["--eager", "--cuda-graph-max-bs", "48"], 0),
    ],
)
def test_the_largest_captured_step_is_an_option(words: list[str], graph_rows: int | None) -> None:
    given = vars(make_parser().parse_args(["serve", *words]))
    del given["command"]
    resolved = resolve(Raw(command_line=given), Facts(default_model=str(MODEL_DIR)))
    assert build_options(resolved, Path("of-no-model")).graph_rows == graph_rows


@pytest.mark.parametrize(("capture", "times"), [("lazy", 0), ("eager", 1)])
def test_graphs_are_captured_at_the_start_if_that_is_wanted(
    capture: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured: list[object] = []
    monkeypatch.setattr(TorchExecutor, "capture_graphs", lambda _, on_progress: captured.append(1))
    given = {"cuda_graph_capture": capture, "load_format": "dummy", "num_pages": 64}
    facts = Facts(default_model=str(MODEL_DIR))
    load_executor(resolve(Raw(command_line=given), facts), MODEL_DIR)
    assert len(captured) == times
