"""Weights that are updated from disk while a server with the bundled model serves."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import os
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import ClientSession
from safetensors.torch import load_file, save_file

from aserve.tiny import MODEL_DIR
from tests.e2e.served import ADMIN_KEY, served
from tests.engine_device import CPU, engine_device
from tests.fakes.lora_adapters import Recipe, write_adapter, write_merged
from tests.parity.real_model import options

PROMPT = [11, 40, 300, 7, 9, 512, 77, 1033, 61, 40, 300, 7, 9, 512, 77, 1033, 61, 8]
SMALL: dict[str, Any] = {"num_pages": 64, "debug_checks": False}  # checks would not be fused
# The CPU computes a token alike in steps of any shape. A device that does not needs float64.
IS_CPU = engine_device() == CPU
DTYPE = "float32" if IS_CPU else "float64"
FORMATS = {
    "fused": {"dtype": DTYPE},
    "per token, with adapters": {"dtype": DTYPE, "deterministic": IS_CPU, "enable_lora": True},
}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another checkpoint of the bundled model."""
    folder = tmp_path_factory.mktemp("weights")
    write_merged(folder / "b", write_adapter(folder / "a", Recipe(1)), Recipe(1))
    return folder / "b"


@asynccontextmanager
async def serving(model: Path, **fields: Any) -> AsyncIterator[ClientSession]:
    resolved = options(port=0, model=str(model), admin_api_key=ADMIN_KEY, **SMALL, **fields)
    async with served(resolved) as session:
        yield session


async def post(client: ClientSession, path: str, /, **body: Any) -> tuple[int, dict[str, Any]]:
    async with client.post(path, json=body) as answer:
        found: dict[str, Any] = await answer.json()
        return answer.status, found


async def outputs(client: ClientSession, num: int = 24) -> tuple[list[int], list[float], str]:
    """Greedy tokens, their log-probabilities, and the version of the weights."""
    sampling = {"temperature": 0, "max_new_tokens": num, "ignore_eos": True}
    _, answer = await post(
        client, "/generate", input_ids=PROMPT, sampling_params=sampling, return_logprob=True
    )
    meta = answer["meta_info"]
    logprobs = [each[0] for each in meta["output_token_logprobs"]]
    return answer["output_ids"], logprobs, meta["weight_version"]


@pytest.mark.parametrize("fields", FORMATS.values(), ids=FORMATS)
async def test_the_outputs_are_those_of_a_server_that_began_with_the_weights(
    other: Path, fields: dict[str, Any]
) -> None:
    async with serving(other, **fields) as fresh:
        expected = await outputs(fresh)
    async with serving(MODEL_DIR, **fields) as client:
        assert (await checked(client, "compare"))["error"]["code"] == "no_snapshot"
        files = [await checked(client, "checksum"), await checked(client, "snapshot")]
        before = await outputs(client)
        assert (await checked(client, "compare"))["success"]
        body = {"model_path": str(other), "weight_version": "step-1"}
        status, answer = await post(client, "/update_weights_from_disk", **body)
        assert (status, answer["success"], answer["new_version"]) == (200, True, "step-1")
        assert await outputs(client) == (*expected[:2], "step-1") != (*before[:2], "step-1")
        assert (await checked(client, "compare"))["error"]["code"] == "weights_differ"
        assert (await checked(client, "checksum"))["payload"] != files[0]["payload"]
        await post(client, "/update_weights_from_disk", model_path=str(MODEL_DIR))
        assert await outputs(client) == before
        assert (await checked(client, "compare"))["success"]
        assert await checked(client, "checksum") == files[0]
        assert "snapshot" in (await checked(client, "reset_tensors"))["error"]["message"]


async def checked(client: ClientSession, action: str) -> dict[str, Any]:
    return (await post(client, "/weights_checker", action=action))[1]


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4096])


def reconfigured(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_theta": 123.0}))


def piped(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")


BREAKAGES: tuple[tuple[Callable[[Path], object], str], ...] = (
    (cut, "not a readable safetensors file"),
    (reconfigured, "rope_theta"),
    (lambda folder: (folder / "model.safetensors").unlink(), "has no model.safetensors"),
    (shutil.rmtree, "does not exist"),
    (piped, "config.json is no regular file"),
)


async def test_a_broken_checkpoint_changes_nothing(other: Path, tmp_path: Path) -> None:
    async with serving(MODEL_DIR, dtype=DTYPE) as client:
        before = await outputs(client)
        for number, (breakage, words) in enumerate(BREAKAGES):
            broken = tmp_path / str(number)
            shutil.copytree(other, broken)
            breakage(broken)
            status, answer = await post(client, "/update_weights_from_disk", model_path=str(broken))
            assert (status, answer["error"]["param"]) == (400, "model_path")
            assert words in answer["error"]["message"]
            assert await outputs(client) == before
        for url, name in (("from_disk", "model_path"), ("from_tensor", "path")):
            status, answer = await post(client, f"/update_weights_{url}", **{name: ""})
            assert (status, answer["error"]["param"]) == (400, name)


async def until(
    client: ClientSession, path: str, is_so: Callable[[dict[str, Any]], object]
) -> None:
    async with asyncio.timeout(60):
        while True:
            async with client.get(path) as answer:
                if is_so(await answer.json()):
                    return


def halves(checkpoint: Path, folder: Path) -> list[str]:
    """Writes the tensors of a checkpoint to two files. The second has some of the first as well."""
    tensors = load_file(checkpoint / "model.safetensors")
    middle = len(tensors) // 2
    names = sorted(tensors)
    parts = {"first": names[: middle + 3], "second": names[middle:]}
    for file, own in parts.items():
        save_file({name: tensors[name] for name in own}, folder / file)
    return [str(folder / file) for file in parts]


async def test_tensors_of_files_take_the_place_of_the_checkpoints_own(
    other: Path, tmp_path: Path
) -> None:
    paths = halves(other, tmp_path)
    url = "/update_weights_from_tensor"
    async with serving(other, dtype=DTYPE) as fresh:
        expected = await outputs(fresh)
    async with serving(MODEL_DIR, dtype=DTYPE) as client:
        before = await outputs(client)
        for path in (*paths, *paths):
            status, answer = await post(client, url, path=path, weight_version="t")
            assert (status, answer.get("success")) == (200, True), answer
        assert await outputs(client) == (*expected[:2], "t")
        save_file({"model.nowhere": torch.zeros(2)}, tmp_path / "unknown")
        save_file({"model.norm.weight": torch.zeros(2)}, tmp_path / "misshapen")
        save_file({"mtp.norm.weight": torch.zeros(2)}, tmp_path / "drafter")
        save_file({}, tmp_path / "empty")
        os.mkfifo(tmp_path / "pipe")
        (tmp_path / "pickle").write_bytes(pickle_of(torch.zeros(2)))
        for name, words in (
            ("unknown", "unexpected: model.nowhere"),
            ("misshapen", "model.norm.weight is 2 instead of"),
            ("drafter", "no tensor that an update can change: mtp.norm.weight"),
            ("empty", "no tensor that an update can change: it is empty"),
            ("pickle", "not a readable safetensors file"),
            ("missing", "does not exist"),
            ("pipe", "pipe is no regular file"),
        ):
            status, answer = await post(client, url, path=str(tmp_path / name))
            assert (status, answer["error"]["param"]) == (400, "path")
            assert words in answer["error"]["message"]
        status, answer = await post(client, url, path="a", serialized_named_tensors=["gASVKA=="])
        assert (status, answer["error"]["param"]) == (400, "serialized_named_tensors")
        assert await outputs(client) == (*expected[:2], "t")
        receipt = {"prompt": PROMPT, "max_tokens": 1, "receipt": True}
        status, answer = await post(client, "/v1/completions", **receipt)
        assert (status, answer["error"]["param"]) == (400, "receipt")
        await post(client, "/update_weights_from_disk", model_path=str(MODEL_DIR))
        assert await outputs(client) == before
        assert (await post(client, "/v1/completions", **receipt))[0] == 200


async def test_weights_whose_files_were_moved_have_no_receipts(other: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(other, tmp_path / "moved")
    receipt = {"prompt": PROMPT, "max_tokens": 1, "receipt": True}
    async with serving(MODEL_DIR, dtype=DTYPE) as client:
        await post(client, "/update_weights_from_disk", model_path=str(moved))
        moved.rename(tmp_path / "away")
        status, answer = await post(client, "/v1/completions", **receipt)
        assert (status, answer["error"]["param"]) == (400, "receipt")
        assert "cannot read the files" in answer["error"]["message"]
        assert "has no weights" in (await checked(client, "checksum"))["error"]["message"]
        (tmp_path / "away").rename(moved)
        status, answer = await post(client, "/v1/completions", **receipt)
        files = (await checked(client, "checksum"))["payload"]["weights"]
        assert answer["receipt"]["model"]["digest"]["weights"] == files != ""


def pickle_of(tensor: torch.Tensor) -> bytes:
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return buffer.getvalue()


async def test_the_executors_steps_are_profiled_into_the_directory_of_the_option(
    tmp_path: Path,
) -> None:
    async with serving(MODEL_DIR, profile_dir=str(tmp_path / "traces")) as client:
        assert (await post(client, "/stop_profile"))[0] == 400
        assert (await post(client, "/start_profile", num_steps=3))[0] == 400
        assert (await post(client, "/start_profile", record_shapes=True))[0] == 200
        assert (await post(client, "/start_profile"))[0] == 409
        before = await outputs(client, 4)
        status, answer = await post(client, "/stop_profile")
        assert status == 200
        assert Path(answer["path"]).parent == tmp_path / "traces"
        assert os.listdir(tmp_path / "traces") == [Path(answer["path"]).name]
        with gzip.open(answer["path"]) as file:
            trace = json.load(file)
        assert {event.get("cat") for event in trace["traceEvents"]} >= {"cpu_op"}
        assert await outputs(client, 4) == before
    async with serving(MODEL_DIR) as client:
        status, answer = await post(client, "/start_profile")
        assert status == 400
        assert "--profile-dir" in answer["error"]["message"]
        status, answer = await post(client, "/sleep")
        assert status == 400
        assert "--processes 2" in answer["error"]["message"]
        assert (await outputs(client, 4))[0] == before[0]


async def test_what_runs_ends_on_the_old_weights_or_is_aborted(other: Path) -> None:
    body: dict[str, Any] = {"model_path": str(other)}
    async with serving(MODEL_DIR, dtype=DTYPE) as client:
        long = (await outputs(client, 400))[:2]
        running = asyncio.ensure_future(outputs(client, 400))
        await until(client, "/load", lambda answer: answer["server_load"])
        assert (await post(client, "/update_weights_from_disk", **body, timeout=0.01))[0] == 400
        updated = asyncio.ensure_future(post(client, "/update_weights_from_disk", **body))
        await until(client, "/is_paused", lambda answer: answer["is_paused"])
        status, answer = await post(client, "/v1/completions", prompt=PROMPT, max_tokens=1)
        assert (status, answer["error"]["code"]) == (503, "server_paused")
        assert (await running)[:2] == long
        assert (await updated)[0] == 200
        running = asyncio.ensure_future(outputs(client, 900))
        await until(client, "/load", lambda answer: answer["server_load"])
        body |= {"abort_all_requests": True, "keep_pause": True}
        assert (await post(client, "/update_weights_from_disk", **body))[0] == 200
        assert len((await running)[0]) < 900
        async with client.get("/is_paused") as answered:
            assert (await answered.json())["is_paused"]


async def test_nothing_runs_across_an_update_and_a_pause_that_was_asked_for_meanwhile_stays(
    other: Path,
) -> None:
    async with serving(MODEL_DIR, dtype=DTYPE) as client:
        running = asyncio.ensure_future(outputs(client, 400))
        await until(client, "/load", lambda answer: answer["server_load"])
        updated = asyncio.ensure_future(
            post(client, "/update_weights_from_disk", model_path=str(other))
        )
        await until(client, "/is_paused", lambda answer: answer["is_paused"])
        assert (await post(client, "/continue_generation"))[1]["is_paused"]
        status, answer = await post(client, "/v1/completions", prompt=PROMPT, max_tokens=1)
        assert (status, answer["error"]["code"]) == (503, "server_paused")
        await post(client, "/pause_generation", mode="wait", timeout=0.001)
        assert (await updated)[0] == 200
        await running
        assert (await post(client, "/v1/completions", prompt=PROMPT, max_tokens=1))[0] == 503
        assert not (await post(client, "/continue_generation"))[1]["is_paused"]
        assert (await post(client, "/v1/completions", prompt=PROMPT, max_tokens=1))[0] == 200
