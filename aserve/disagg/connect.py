"""Connects an engine with those that compute prompts for it, or for which it computes prompts."""

from __future__ import annotations

import hashlib
import logging
import socket
import uuid
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec

from aserve.actors.scheduler import PeerEvent
from aserve.actors.supervisor import Supervised
from aserve.channel import Sink
from aserve.config import DisaggregationOptions, Resolved
from aserve.disagg.decode import Awaiting, KvReceiver
from aserve.disagg.prefill import KvSender, Peers, WithoutTransfers, listen
from aserve.disagg.transports import BlockReaders, BlockSenders
from aserve.errors import UNDECODABLE, ConfigError, ErrorInfo
from aserve.host.hub import resolve_model_dir
from aserve.host.threads import in_thread
from aserve.json_file import read_json_object
from aserve.messages.changes import EngineJob, LoadWeights
from aserve.messages.executor import EngineSpec, SchedulerEvent
from aserve.messages.output import DetokenizerEvent
from aserve.messages.transfers import LayeredKvAccess
from aserve.observability.reports import KvTransferred
from aserve.options.option import host_and_port

SAMPLE_BYTES = 4096  # of each tensor
MAX_HEAD_BYTES = 100_000_000  # of a safetensors file, as the library has it
STRETCHED_ROPES = ("dynamic", "longrope", "su")  # whose frequencies depend on the context

logger = logging.getLogger(__name__)


@runtime_checkable
class HasKv(Protocol):
    """An executor whose KV can be transferred."""

    spec: EngineSpec

    def kv_access(self) -> LayeredKvAccess:
        """Raises ConfigError if this executor's cannot."""


@dataclass(frozen=True, slots=True)
class Transfers:
    """The ports of a scheduler with transfers, and the actors behind them. `requests` is the
    scheduler's inbox for requests.
    """

    requests: Sink[SchedulerEvent]
    text: Sink[DetokenizerEvent]
    kv: Sink[PeerEvent] | None = None
    actors: tuple[Supervised, ...] = ()
    weights: TransferredWeights | None = None

    async def run_job(self, job: EngineJob, work: Awaitable[ErrorInfo | None]) -> ErrorInfo | None:
        if self.weights is None or not isinstance(job, LoadWeights):
            return await work
        return await self.weights.replaced(job, work)


class HasModel(Protocol):
    def name_model(self, model: str, *, namespace: str) -> None: ...


class TransferredWeights:
    """Lets KV be transferred only between engines with the same weights while these are replaced,
    first here or first there. Elsewhere prompts are computed where they are needed.
    """

    def __init__(
        self, actor: HasModel, model: str, *, resolved: Resolved, spec: EngineSpec
    ) -> None:
        self._actor = actor
        self._model, self._namespace = model, ""
        self._resolved, self._spec = resolved, spec

    async def replaced(
        self, load: LoadWeights, work: Awaitable[ErrorInfo | None]
    ) -> ErrorInfo | None:
        """Runs an update. Meanwhile this engine has no weights of any name."""
        self._actor.name_model(f"update {uuid.uuid4().hex}", namespace=self._namespace)
        error = await work
        if error is None:
            self._model = await in_thread(lambda: self._name_of(load), name="weights")
            self._namespace = f"/{load.update_id}"
        self._actor.name_model(self._model, namespace=self._namespace)
        return error

    def _name_of(self, load: LoadWeights) -> str:
        """Files that have gone meanwhile match no other engine's."""
        try:
            folder = Path(load.path) if load.path else None
            name = name_of_model(self._resolved, self._spec, folder=folder)
            return " + ".join([name, *(_digest_of(Path(file)) for file in load.tensors)])
        except OSError as error:
            logger.warning("no KV is transferred: the new weights cannot be read: %s", error)
            return f"unknown {uuid.uuid4().hex}"


def open_transfers(
    executor: object,
    resolved: Resolved,
    *,
    events: Sink[SchedulerEvent],
    text: Sink[DetokenizerEvent],
    report: Callable[[KvTransferred], None],
) -> Transfers:
    """Raises ConfigError if the options do not fit together, or the port is taken."""
    options = resolved.disaggregation
    mode = options.disaggregation_mode
    if mode == "null":
        return Transfers(events, text)
    if not isinstance(executor, HasKv):
        raise ConfigError(
            f"--disaggregation-mode {mode}: the device {resolved.machine.device} cannot transfer KV"
        )
    spec = executor.spec
    if spec.task != "generate" or not spec.decode.root_len or spec.decode.is_recurrent:
        raise ConfigError(
            f"--disaggregation-mode {mode} is for models that generate token by token and keep "
            "nothing but KV, not for diffusion, embedding or classifying models, nor for models "
            "with recurrent layers"
        )
    access = executor.kv_access()
    model = name_of_model(resolved, spec)
    key = options.disaggregation_key or ""
    if mode == "decode":
        addresses = _addresses(options)
        block_readers = BlockReaders(options.disaggregation_transfer_backend)
        receiver = KvReceiver(
            access,
            events,
            addresses,
            key=key,
            model=model,
            report=report,
            block_readers=block_readers,
        )
        weights = TransferredWeights(receiver, model, resolved=resolved, spec=spec)
        return Transfers(Awaiting(events), text, receiver, (receiver,), weights)
    block_senders = BlockSenders(options.disaggregation_transfer_backend)
    sock = _listen(options)
    sender = KvSender(access, events, Peers(key, model), sock, report, block_senders=block_senders)
    weights = TransferredWeights(sender, model, resolved=resolved, spec=spec)
    return Transfers(events, WithoutTransfers(text, sender), sender, (sender,), weights)


def name_of_model(resolved: Resolved, spec: EngineSpec, *, folder: Path | None = None) -> str:
    """Returns a name that engines share only if their weights give the same KV. They are those of
    the options, or of another `folder`.
    """
    is_dummy = resolved.model.load_format == "dummy" and folder is None
    folder = folder or resolve_model_dir(resolved.model_source, has_weights=not is_dummy)
    digest = fingerprint(folder, max_model_len=spec.max_model_len, is_dummy=is_dummy)
    return f"{digest} {resolved.model.quantization or ''}".strip()


def fingerprint(folder: Path, *, max_model_len: int, is_dummy: bool = False) -> str:
    """Returns a digest of a model's configuration, and of samples of all tensors of its weights. A
    fine-tuned model has the configuration of its base, and may differ from it in few tensors, but
    all over these. The context counts where rotary frequencies are chosen by it.
    """
    config = folder / "config.json"
    digest = hashlib.sha256(config.read_bytes())
    if _has_stretched_rope(read_json_object(config)):
        digest.update(f"{max_model_len}".encode())
    for path in () if is_dummy else sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name} {path.stat().st_size}".encode())
        for sample in _samples(path):
            digest.update(sample)
    return digest.hexdigest()[:32]


def _digest_of(path: Path) -> str:
    return hashlib.sha256(b"".join(_samples(path))).hexdigest()[:32]


def _has_stretched_rope(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    is_one = any(value.get(name) in STRETCHED_ROPES for name in ("rope_type", "type"))
    return is_one or any(map(_has_stretched_rope, value.values()))


class _Tensor(msgspec.Struct):
    data_offsets: tuple[int, int] = (0, 0)  # behind the head; its metadata have none


def _samples(path: Path) -> Iterator[bytes]:
    """Yields the head of a safetensors file, and the middle of each tensor. A file that is none,
    which the model does not need, has a head alone.
    """
    with path.open("rb") as file:
        size = file.read(8)
        head = file.read(min(int.from_bytes(size, "little"), MAX_HEAD_BYTES))
        yield head
        try:
            tensors = msgspec.json.decode(head, type=dict[str, _Tensor])
        except UNDECODABLE:
            return
        for tensor in tensors.values():
            begin, end = tensor.data_offsets
            file.seek(len(size) + len(head) + max(begin, (begin + end - SAMPLE_BYTES) // 2))
            yield file.read(SAMPLE_BYTES)


def _addresses(options: DisaggregationOptions) -> list[tuple[str, int]]:
    if not options.disaggregation_prefill:
        raise ConfigError(
            "--disaggregation-mode decode needs --disaggregation-prefill HOST:PORT,...: the "
            "engines that compute its prompts"
        )
    try:
        return [host_and_port(each.strip()) for each in options.disaggregation_prefill.split(",")]
    except ValueError as error:
        raise ConfigError(f"--disaggregation-prefill: {error}") from None


def _listen(options: DisaggregationOptions) -> socket.socket:
    host, port = options.disaggregation_host, options.disaggregation_bootstrap_port
    try:
        sock = listen(host, port)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"--disaggregation-mode prefill: cannot listen on {host}:{port}: {error}"
        ) from None
    logger.info("decode engines can fetch KV at %s:%d", *sock.getsockname()[:2])
    return sock
