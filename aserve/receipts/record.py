"""A receipt: what an answer was computed from and what came out, so that somebody else can compute
it again (`aserve verify`).

Each section has a hash, which shows an accidental change and where it is. The hashes are no
signature: what proves a receipt is computing its tokens again.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TypeAlias

import msgspec

from aserve.errors import UNDECODABLE, ConfigError, InvalidRequest
from aserve.messages.requests import SamplingParams

Settings: TypeAlias = dict[str, str | int | bool | None]

VERSION = 1
# The options that may change tokens. The others decide when a token comes, not which one.
NUMERIC_OPTIONS = (
    *("load_format", "model_impl", "dtype", "quantization", "kv_cache_dtype", "page_size"),
    *("max_num_batched_tokens", "device", "attention_backend", "deterministic"),
)


class ModelDigest(msgspec.Struct, frozen=True):
    """SHA-256 of the files of a model, or of a LoRA adapter: of weights, configuration and
    tokenizer. One that has no such files has an empty digest.
    """

    weights: str
    config: str
    tokenizer: str = ""


class ReceiptModel(msgspec.Struct, frozen=True):
    name: str
    digest: ModelDigest
    adapter: ModelDigest | None = None


class ReceiptOutput(msgspec.Struct, frozen=True):
    """A choice of the answer: sequence `child` of prompt number `prompt`."""

    index: int
    prompt: int
    child: int
    token_ids: list[int]
    finish_reason: str | None = None


class Machine(msgspec.Struct, frozen=True):
    """Equal bits need an equal kind of processor and equal libraries."""

    platform: str
    processor: str
    aserve: str
    torch: str


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """`settings` are the server's options of NUMERIC_OPTIONS, with the dtype that was chosen.
    `hashes` has the SHA-256 of each other field's canonical JSON.
    """

    version: int = VERSION
    id: str
    created: int
    model: ReceiptModel
    settings: Settings
    machine: Machine
    sampling: SamplingParams
    prompts: list[list[int]]
    outputs: list[ReceiptOutput]
    hashes: dict[str, str] = {}

    def altered(self) -> list[str]:
        """Returns the fields that are not those of the hashes."""
        given = set(self.hashes) | {name for name, _ in self._sections()}
        found = dict(self._sections())
        return sorted(name for name in given if self.hashes.get(name) != found.get(name))

    def sealed(self) -> Receipt:
        return msgspec.structs.replace(self, hashes=dict(self._sections()))

    def _sections(self) -> Iterator[tuple[str, str]]:
        for name in self.__struct_fields__:
            if name != "hashes":
                data = msgspec.json.encode(getattr(self, name), order="deterministic")
                yield name, hashlib.sha256(data).hexdigest()


class Answer(msgspec.Struct):
    """An answer of the server, of which only the receipt is read."""

    receipt: Receipt


def receipt_in(path: Path) -> Receipt:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the receipt {path}: {error.strerror}") from None
    return read_receipt(content)


def read_receipt(data: bytes) -> Receipt:
    """Reads a receipt, or an answer that has one. Raises InvalidRequest."""
    try:
        given = msgspec.json.decode(data)
        has_receipt = isinstance(given, dict) and "receipt" in given
        if has_receipt:
            return msgspec.convert(given, Answer).receipt
        return msgspec.convert(given, Receipt)
    except UNDECODABLE as error:
        raise InvalidRequest(f"this is neither a receipt nor an answer with one: {error}") from None


def this_machine() -> Machine:
    return Machine(
        f"{platform.system()} {platform.machine()}",
        _processor(),
        installed("aserve"),
        installed("torch"),
    )


def installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _processor() -> str:
    """Returns the name of the processor, for which Linux has a file."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            lines = (line.partition(":") for line in file)
            names = (value.strip() for name, _, value in lines if name.strip() == "model name")
            return next(names, platform.processor())
    except OSError:
        return platform.processor()
