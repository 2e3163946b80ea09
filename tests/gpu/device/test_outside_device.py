"""A device of another package runs the engine, known by its entry points alone."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from aserve.engine import Engine
from aserve.errors import ConfigError
from aserve.gpu.device.registry import open_device
from tests.engine_device import OUTSIDE
from tests.fakes.hash_model import HashModel
from tests.gpu.drive import captured, make_executor, request, serve
from tests.gpu.plain_engine import plain_tokens
from tests.gpu.test_traces import DRAFT_MODELS, MODES, Trace, assert_plain, serve_trace, traces

NAME = "example-npu"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder holds the package and its metadata, as `pip install --target` leaves them."""
    monkeypatch.syspath_prepend(str(OUTSIDE))


@pytest.mark.usefixtures("installed")
def test_any_trace_gives_the_tokens_of_the_plain_engine() -> None:
    """Latents, and lengths that the host does not know, are attended by the reference, in graphs as
    well.

    `pytest --device example-npu` runs the other tests of the engine on the device, as `make
    test-all` does.
    """

    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(traces())
    def check(trace: Trace) -> None:
        trace = dataclasses.replace(trace, is_unsound=False)
        executor = make_executor(
            trace.model(),
            mode=MODES[trace.mode](),
            device=open_device(NAME),
            drafter=DRAFT_MODELS.get(trace.mode),
            **{**trace.options, "attention": "auto"},
        )
        captured(executor)
        assert NAME in executor.about
        assert_plain(trace, serve_trace(executor, trace))

    check()


@pytest.mark.usefixtures("installed")
def test_the_lengths_of_replayed_steps_reach_it_beside_the_replay() -> None:
    options: dict[str, Any] = {"attention": "auto", "graph_rows": 4}
    executor = captured(make_executor(HashModel(), device=open_device(NAME), **options))
    asked = [request(f"r{number}", [number, 5, 3], max_tokens=9 + number) for number in range(3)]
    refreshed = sys.modules["aserve_example_npu.attention"].REFRESHED
    refreshed.clear()
    assert serve(executor, asked).outputs == plain_tokens(asked, HashModel())
    assert len(refreshed) > 8


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
def test_the_whole_engine_runs_on_it() -> None:
    prompts = ["Once upon a time", "What is 27 plus 15?"]
    answers = []
    for device in ("cpu", NAME):
        with Engine(device=device, dtype="float32", max_num_seqs=4) as engine:
            made = engine.generate_sync(prompts, max_tokens=24, temperature=0.0)
            answers.append([answer.text for answer in made])
    assert answers[0] == answers[1]


def test_a_device_that_is_not_installed_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"supported: auto, cpu, cuda, mlx$"):
        open_device(NAME)


@pytest.mark.usefixtures("installed")
def test_devices_of_packages_are_named_beside_ours() -> None:
    with pytest.raises(ConfigError, match=f"supported: auto, cpu, cuda, {NAME}, mlx$"):
        open_device("another")
