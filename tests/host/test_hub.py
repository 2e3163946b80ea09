"""Names of models: directories, and the hub where it answers, refuses or is silent."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from aserve.errors import ConfigError
from aserve.host import hub
from aserve.host.hub import resolve_file, resolve_model_dir


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


def test_a_directory_is_used_as_it_is_and_its_configuration_stands_for_it(
    fake_hub: FakeHub, tmp_path: Path
) -> None:
    said = f"{tmp_path} is not a model directory: it has no config.json"
    assert refusal_of(str(tmp_path)) == said
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    config.touch()
    weights.touch()
    assert resolve_model_dir(str(tmp_path)) == resolve_model_dir(str(config)) == tmp_path
    assert "is a file; give the directory" in refusal_of(str(weights))
    assert fake_hub.downloads == []


@pytest.mark.parametrize("name", ["./model", "/no/model", "../up/model", "a/b/c", "~/model", "a/"])
def test_a_path_that_does_not_exist_is_not_asked_of_the_hub(fake_hub: FakeHub, name: str) -> None:
    assert refusal_of(name) == f"model directory {name!r} does not exist"
    assert fake_hub.downloads == []


def test_only_weights_tokenizer_and_configuration_are_fetched(fake_hub: FakeHub) -> None:
    assert resolve_model_dir("someone/model") == fake_hub.snapshot
    ((*patterns,),) = fake_hub.downloads
    assert {"config.json", "model*.safetensors", "tokenizer.json"} <= set(patterns)
    assert not [p for p in patterns if p.endswith((".py", ".bin", ".pt", ".pth", "*"))]
    resolve_model_dir("someone/model", has_weights=False)
    assert not [p for p in fake_hub.downloads[1] if "safetensors" in p]


def test_what_the_hub_answers_is_one_clear_error(fake_hub: FakeHub) -> None:
    client_error = next(base for base in HfHubHTTPError.__bases__ if base is not OSError)
    fake_hub.answer = client_error("no route to host")
    said = "neither a directory nor in the download cache, and the hub cannot be reached"
    assert said in refusal_of("someone/model")
    fake_hub.answer = GatedRepoError.__new__(GatedRepoError)  # its licence must be accepted
    assert "is gated: accept its terms on the hub, then log in" in refusal_of("someone/model")
    fake_hub.answer = RepositoryNotFoundError.__new__(RepositoryNotFoundError)
    assert "neither a directory nor a model of the hub" in refusal_of("someone/model")


def test_a_hub_that_stays_silent_is_given_up_at_the_deadline(
    fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hub.ANSWER_TIMEOUT_S < 15
    monkeypatch.setattr(hub, "ANSWER_TIMEOUT_S", 0.01)
    fake_hub.answer = threading.Event()
    started_s = time.monotonic()
    try:
        assert "the hub cannot be reached" in refusal_of("someone/model")
        assert time.monotonic() - started_s < 30
    finally:
        fake_hub.answer.set()


def test_without_the_hub_a_download_of_before_serves(fake_hub: FakeHub) -> None:
    fake_hub.answer = OfflineModeIsEnabled("HF_HUB_OFFLINE is set")
    fake_hub.is_cached = True
    assert resolve_model_dir("someone/model") == fake_hub.snapshot


def test_a_name_that_the_hub_cannot_have_is_refused() -> None:
    assert "'some--one/model' could not be fetched from the hub" in refusal_of("some--one/model")


def test_a_file_lies_here_or_in_a_repository_of_the_hub(fake_hub: FakeHub, tmp_path: Path) -> None:
    own = tmp_path / "freq.pt"
    own.touch()
    assert resolve_file(str(own)) == own
    for name in ("freq.pt", "model/freq.pt", "/no/such/freq.pt"):
        with pytest.raises(ConfigError, match=f"file {name!r} does not exist"):
            resolve_file(name)
    assert fake_hub.downloads == []
    with pytest.raises(ConfigError, match="'someone/model' of the hub has no file 'freq"):
        resolve_file("someone/model/freq.pt")
    fake_hub.snapshot.mkdir()
    (fake_hub.snapshot / "freq.pt").touch()
    assert resolve_file("someone/model/freq.pt") == fake_hub.snapshot / "freq.pt"
    assert fake_hub.downloads == [["freq.pt"], ["freq.pt"]]
