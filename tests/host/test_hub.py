"""Names of models: directories, and the hub where it answers, refuses or is silent."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

from aserve.errors import ConfigError
from aserve.host import hub
from aserve.host.hub import resolve_model_dir


class FakeHub:
    """Stands in for the client's two calls; notes what was asked of it."""

    def __init__(self, snapshot: Path) -> None:
        self.snapshot = snapshot
        self.answer: BaseException | threading.Event | None = None
        self.is_cached = False
        self.downloads: list[list[str]] = []

    def model_info(self, _name: str, *, timeout: float) -> None:
        assert timeout < 15
        if isinstance(self.answer, threading.Event):
            self.answer.wait()
        elif self.answer is not None:
            raise self.answer

    def snapshot_download(
        self, _name: str, *, allow_patterns: list[str], local_files_only: bool = False
    ) -> str:
        if local_files_only and not self.is_cached:
            raise LocalEntryNotFoundError("not cached")
        self.downloads.append(allow_patterns)
        return str(self.snapshot)


@pytest.fixture
def fake_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(tmp_path / "snapshot")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: fake)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    return fake


def refusal_of(name: str) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_model_dir(name)
    return str(caught.value)


def test_a_directory_without_a_config_is_no_model(fake_hub: FakeHub, tmp_path: Path) -> None:
    """Nothing else that it lacks is worth a word, such as its tokenizer."""
    said = f"{tmp_path} is not a model directory: it has no config.json"
    assert refusal_of(str(tmp_path)) == said


def test_a_directory_is_used_as_it_is(fake_hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    assert resolve_model_dir(str(tmp_path)) == tmp_path
    assert fake_hub.downloads == []


@pytest.mark.parametrize("name", ["./model", "/no/model", "../up/model", "a/b/c", "~/model", "a/"])
def test_a_path_that_does_not_exist_is_not_asked_of_the_hub(fake_hub: FakeHub, name: str) -> None:
    assert refusal_of(name) == f"model directory {name!r} does not exist"
    assert fake_hub.downloads == []


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    assert "is a file; give the directory" in refusal_of(str(file))


def test_a_configuration_stands_for_its_directory(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.touch()
    assert resolve_model_dir(str(file)) == tmp_path


def test_no_weights_are_fetched_for_a_model_that_needs_none(fake_hub: FakeHub) -> None:
    resolve_model_dir("someone/model", has_weights=False)
    ((*patterns,),) = fake_hub.downloads
    assert "config.json" in patterns
    assert not [pattern for pattern in patterns if "safetensors" in pattern]


def test_only_weights_tokenizer_and_configuration_are_fetched(fake_hub: FakeHub) -> None:
    assert resolve_model_dir("someone/model") == fake_hub.snapshot
    ((*patterns,),) = fake_hub.downloads
    assert {"config.json", "model*.safetensors", "tokenizer.json"} <= set(patterns)
    assert not [p for p in patterns if p.endswith((".py", ".bin", ".pt", ".pth", "*"))]


def test_a_hub_that_cannot_be_reached_is_one_clear_error(fake_hub: FakeHub) -> None:
    client_error = next(base for base in HfHubHTTPError.__bases__ if base is not OSError)
    fake_hub.answer = client_error("no route to host")
    assert "neither a directory nor in the download cache, and the hub cannot be reached" in (
        refusal_of("someone/model")
    )


def test_a_hub_that_stays_silent_is_given_up_at_the_deadline(
    fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hub.ANSWER_TIMEOUT_S < 15
    monkeypatch.setattr(hub, "ANSWER_TIMEOUT_S", 0.01)
    fake_hub.answer = threading.Event()
    started_s = time.monotonic()
    try:
        assert "the hub cannot be reached" in refusal_of("someone/model")
        assert time.monotonic() - started_s < 4
    finally:
        fake_hub.answer.set()


def test_without_the_hub_a_download_of_before_serves(fake_hub: FakeHub) -> None:
    fake_hub.answer = OfflineModeIsEnabled("HF_HUB_OFFLINE is set")
    fake_hub.is_cached = True
    assert resolve_model_dir("someone/model") == fake_hub.snapshot


def test_a_name_that_the_hub_does_not_know_is_said_to_be_so(fake_hub: FakeHub) -> None:
    fake_hub.answer = _unknown_repository()
    assert "neither a directory nor a model of the hub" in refusal_of("someone/model")


def test_a_name_that_the_hub_cannot_have_is_refused() -> None:
    assert "'some--one/model' could not be fetched from the hub" in refusal_of("some--one/model")


def _unknown_repository() -> BaseException:
    from huggingface_hub.errors import RepositoryNotFoundError

    return RepositoryNotFoundError.__new__(RepositoryNotFoundError)
