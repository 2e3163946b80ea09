"""Finds a model's files: in a local directory, or in a repository of the Hugging Face hub.

Only weights, tokenizer and configuration are downloaded, never code.
"""

from __future__ import annotations

import re
import threading
from pathlib import Path

from aserve.errors import ConfigError

WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")
SETTINGS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
ANSWER_TIMEOUT_S = 12.0


def resolve_model_dir(name: str, *, has_weights: bool = True) -> Path:
    """Returns the model's directory, and downloads it first if `name` is a hub id.

    `name` may also be the path of a config.json, or a GGUF file as `resolve_file` takes it, of
    which a directory is made. With `has_weights=False` no weights are fetched.
    """
    if name.endswith(".gguf"):
        from aserve.gguf.model_dir import gguf_model_dir  # only for those who use it

        return gguf_model_dir(resolve_file(name))
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").exists():
            files = sorted(file.name for file in path.glob("*.gguf"))
            hint = f"; to serve {files[0]}, name that file" if files else ""
            raise ConfigError(f"{path} is not a model directory: it has no config.json{hint}")
        return path
    if path.is_file() and path.name == "config.json":
        return path.parent
    if path.exists():
        raise ConfigError(f"model {name!r} is a file; give the directory that it is in")
    if not HUB_NAME.fullmatch(name):
        raise ConfigError(f"model directory {name!r} does not exist")
    wanted = [*SETTINGS, *WEIGHTS] if has_weights else [*SETTINGS]
    return _download(name, wanted) if _is_reachable(name) else _cached(name, wanted)


def resolve_file(name: str) -> Path:
    """Returns a file, and downloads it first if `name` is a hub id and the file's name in it."""
    path = Path(name).expanduser()
    if path.is_file():
        return path
    model, _, file_name = name.rpartition("/")
    if "/" not in model or not HUB_NAME.fullmatch(model):
        raise ConfigError(f"file {name!r} does not exist")
    fetch = _download if _is_reachable(model) else _cached
    found = fetch(model, [file_name]) / file_name
    if not found.is_file():
        raise ConfigError(f"model {model!r} of the hub has no file {file_name!r}")
    return found


def _is_reachable(name: str) -> bool:
    """Returns whether the hub answers within ANSWER_TIMEOUT_S. Raises the ConfigError of a model
    that it refuses.

    WHY: the hub's client tries the addresses of a host one after the other, each with the whole
    timeout, so a thread of its own keeps the deadline. It does not keep the process from ending.
    """
    probe = _Probe(name)
    probe.start()
    probe.join(ANSWER_TIMEOUT_S)
    if probe.refusal is not None:
        raise probe.refusal
    return probe.has_answer


class _Probe(threading.Thread):
    """Asks the hub for the model. This thread writes both results; read them after `join`."""

    def __init__(self, name: str) -> None:
        super().__init__(name="hub-probe", daemon=True)
        self.model = name
        self.has_answer = False
        self.refusal: ConfigError | None = None

    def run(self) -> None:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

        try:
            HfApi().model_info(self.model, timeout=ANSWER_TIMEOUT_S)
            self.has_answer = True
        except (RepositoryNotFoundError, HFValidationError) as error:
            self.refusal = _refusal(self.model, error)
        except _network_errors():
            self.has_answer = False


def _download(name: str, wanted: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except _network_errors() as error:
        raise _refusal(name, error) from error


def _cached(name: str, wanted: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=wanted, local_files_only=True))
    except OSError:
        raise ConfigError(
            f"model {name!r} is neither a directory nor in the download cache, "
            "and the hub cannot be reached"
        ) from None


def _refusal(name: str, error: Exception) -> ConfigError:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return ConfigError(f"model {name!r} is gated: accept its terms on the hub, then log in")
    if isinstance(error, RepositoryNotFoundError):
        return ConfigError(
            f"model {name!r} is neither a directory nor a model of the hub that you may see"
        )
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return ConfigError(f"model {name!r} could not be fetched from the hub: {text}")


def _network_errors() -> tuple[type[Exception], ...]:
    """Returns the errors of the hub and of its HTTP client.

    The client differs between releases of the hub's library, and the root of its errors is a base
    class of the hub's error.
    """
    from huggingface_hub.errors import HfHubHTTPError

    return (OSError, *(base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception)))
