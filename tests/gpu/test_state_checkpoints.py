"""The prefix cache of models with recurrent layers, in the whole engine: prompts that begin alike
go on behind checkpoints of states, and their tokens are those of the whole history.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from aserve.gpu.build import BuildOptions, build_executor, build_on
from aserve.gpu.executor import TorchExecutor
from aserve.gpu.models.base import CausalModel
from aserve.gpu.spec.request import SpecOptions
from aserve.messages.base import array_i32
from aserve.messages.requests import AdmitRequest
from tests.fakes.graph_device import GraphDevice
from tests.gpu.drive import Served, captured, request, serve
from tests.gpu.test_recurrent_model import MAMBAS, fail_forwards, greedy
from tests.load_model import load_model
from tests.parity.references import VOCAB_SIZE, make_reference

pytestmark = pytest.mark.slow

NUM_TOKENS = 14
SMALL: dict[str, Any] = {
    "dtype": "float64",
    "num_pages": 90,
    "page_size": 4,
    "max_rows": 3,
    "depth": 2,
    "lead": 2,
    "checkpoint_interval": 8,
}
WAYS: dict[str, dict[str, Any]] = {
    "one at a time": {"depth": 1, "lead": 1, "max_rows": 1},
    "overlap": {},
    "three steps ahead": {"depth": 3, "lead": 3},
    "pages of one token": {"page_size": 1, "num_pages": 360},
    "pages of 16 tokens": {"page_size": 16, "num_pages": 30},
    "chunks": {"max_batched_tokens": 11},
    "retraction": {"num_pages": 28, "max_rows": 4},
    "one checkpoint": {"num_checkpoints": 1},
    "three checkpoints": {"num_checkpoints": 3},
    "drafts": {"speculative": SpecOptions("NGRAM", num_steps=3)},
}


@pytest.fixture(scope="module", params=["qwen3.5", "lfm2", *MAMBAS])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoints")
    make_reference(request.param, directory)
    return directory


@pytest.fixture(scope="module")
def model(folder: Path) -> CausalModel:
    return load_model(folder, dtype="float64")


@pytest.fixture(scope="module")
def chats(model: CausalModel) -> dict[str, list[int]]:
    """Prompts by name: a system prompt with several continuations, a chat of three turns that
    begins with it, and a prompt that comes twice.
    """
    draws = torch.Generator().manual_seed(7)

    def some(num_tokens: int) -> list[int]:
        return torch.randint(VOCAB_SIZE, (num_tokens,), generator=draws).tolist()

    system, found = some(33), dict[str, list[int]]()
    history = [*system, *some(9)]
    for turn in range(3):
        found[f"turn{turn}"] = history
        history = [*history, *greedy(model, history, NUM_TOKENS), *some(6)]
    found |= {f"other{number}": [*system, *some(5 + number)] for number in range(3)}
    found["again"] = found["turn0"]
    return found


@pytest.fixture(scope="module")
def expected(model: CausalModel, chats: dict[str, list[int]]) -> dict[tuple[str, int], list[int]]:
    return {(name, 0): greedy(model, prompt, NUM_TOKENS) for name, prompt in chats.items()}


def asks(chats: dict[str, list[int]]) -> list[AdmitRequest]:
    return [request(name, prompt, max_tokens=NUM_TOKENS) for name, prompt in chats.items()]


def executor_of(folder: Path, **options: Any) -> TorchExecutor:
    return build_executor(BuildOptions(folder, debug_checks=True, **{**SMALL, **options}))


def num_read(served: Served) -> int:
    states = [batch.states for batch in served.batches if batch.states is not None]
    return sum(len(array_i32(each.read_rows)) for each in states)


@pytest.mark.parametrize("way", WAYS)
def test_tokens_behind_checkpoints_are_those_of_the_whole_history(
    folder: Path, chats: dict[str, list[int]], expected: dict[tuple[str, int], list[int]], way: str
) -> None:
    served = serve(executor_of(folder, **WAYS[way]), asks(chats), chaos=3)
    assert served.outputs == expected
    assert num_read(served) > 0
    assert served.num_cached > 0
    assert (served.num_retracted > 0) is (way == "retraction")


def test_a_prompt_is_computed_once_where_the_next_one_begins_with_it(
    folder: Path, chats: dict[str, list[int]]
) -> None:
    """The second turn begins behind the last checkpoint of the first turn's answer, and the prompt
    that comes again behind its last whole page."""
    asked = asks({name: chats[name] for name in ("turn0", "turn1", "again")})
    served = serve(executor_of(folder, **WAYS["one at a time"]), asked)
    num_computed = sum(len(array_i32(batch.input_ids)) for batch in served.batches)
    num_tokens = sum(len(array_i32(each.prompt_ids)) + NUM_TOKENS - 1 for each in asked)
    assert len(chats["turn0"]) == 42
    assert num_tokens - num_computed == 48 + 40


def test_a_shared_system_prompt_has_a_checkpoint_after_its_second_use(
    folder: Path, chats: dict[str, list[int]]
) -> None:
    """Nobody knows where it ends before a second prompt begins with it."""
    asked = asks({name: chats[name] for name in ("other0", "other1", "other2")})
    served = serve(executor_of(folder, **WAYS["one at a time"]), asked)
    cached = [batch.stats.num_cached_tokens for batch in served.batches]
    assert [num_tokens for num_tokens in cached if num_tokens] == [32]


def test_without_checkpoints_there_is_no_prefix_cache(
    folder: Path, chats: dict[str, list[int]], expected: dict[tuple[str, int], list[int]]
) -> None:
    executor = executor_of(folder, num_checkpoints=0)
    served = serve(executor, asks(chats), chaos=3)
    assert served.outputs == expected
    assert served.num_cached == 0
    assert not executor.spec.prefix_cache


def test_rows_that_are_retracted_at_any_time_go_on_at_their_checkpoints(
    folder: Path, chats: dict[str, list[int]], expected: dict[tuple[str, int], list[int]]
) -> None:
    served = serve(executor_of(folder), asks(chats), chaos=7, retract_rate=0.3)
    assert served.outputs == expected
    assert served.num_retracted > 1


def test_what_a_failed_step_leaves_behind_is_no_checkpoint(
    folder: Path, chats: dict[str, list[int]], expected: dict[tuple[str, int], list[int]]
) -> None:
    """The states of its rows have advanced, and were copied or not."""
    executor = executor_of(folder)
    fail_forwards(executor, {1, 3, 6, 9, 10, 17})
    served = serve(executor, asks(chats), chaos=3)
    assert served.num_resyncs >= 4
    assert served.outputs == expected


def test_captured_steps_leave_checkpoints_as_eager_ones_do(
    folder: Path, chats: dict[str, list[int]], expected: dict[tuple[str, int], list[int]]
) -> None:
    device = GraphDevice()
    build = BuildOptions(folder, attention="torch-ref", **SMALL)
    served = serve(captured(build_on(device, build)), asks(chats), chaos=3)
    assert served.outputs == expected
    assert num_read(served) > 0
    assert device.num_replays > 10


def test_the_start_says_how_much_memory_checkpoints_take(folder: Path) -> None:
    executor = executor_of(folder)
    assert "MiB of checkpoints of these states" in executor.about
    assert executor.spec.num_checkpoints > 10
