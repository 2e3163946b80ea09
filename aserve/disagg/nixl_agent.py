"""NIXL as a transport (`pip install 'aserve[nixl]'`): the decode side reads blocks where they lie.

Each engine has one agent, which registers the engine's arena once. A prefill engine offers the
metadata of its agent with every transfer; a decode engine loads it once for each agent. A block is
one READ from the slot of the peer into a slot of this engine. The thread of the transfer waits for
it, never the event loop. The message Taken then gives the slot of the peer back, as it does with
memory that both map.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

from aserve.disagg.arena import Arena
from aserve.disagg.wire import IDLE_S, NixlPlace, TransferError
from aserve.errors import ConfigError

FLAG = "--disaggregation-transfer-backend nixl"
SPINS = 100  # looks at a READ before the thread begins to sleep between them
POLL_S = 100e-6

logger = logging.getLogger(__name__)


class NixlAgent:
    """Any thread may read. `arena` is what peers read, and where this engine reads to."""

    def __init__(self, arena: Arena) -> None:
        """Raises ConfigError if NIXL is not installed or cannot begin."""
        try:
            from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t
        except ImportError as error:
            raise ConfigError(f"{FLAG}: {error}; pip install 'aserve[nixl]'") from None
        logging.getLogger("nixl").setLevel(logging.WARNING)  # it writes to stdout
        name = f"aserve-{uuid.uuid4().hex}"
        sync = nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        self._arena = arena
        self._free = threading.Semaphore(arena.num_free)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._peers: dict[str, str] = {}  # by agent, the name under which NIXL knows it
        try:
            self._agent: Any = nixl_agent(name, nixl_agent_config(backends=["UCX"], sync_mode=sync))
            memory = [(arena.address, len(arena.memory), 0, "")]
            self._registered = self._agent.register_memory(memory, "DRAM")
            metadata: bytes = self._agent.get_agent_metadata()
        except Exception as error:  # NIXL's errors have no base of their own
            raise ConfigError(f"{FLAG}: NIXL cannot begin: {error!r}") from None
        self.place = NixlPlace(name, metadata, arena.address, len(arena.memory))

    @property
    def num_peers(self) -> int:
        return len(self._peers)

    def read(self, place: NixlPlace, offset: int, values: memoryview) -> None:
        """Copies what lies at an offset of a peer's memory. Raises OSError if it cannot."""
        if not self._free.acquire(timeout=IDLE_S):
            raise TransferError(f"no slot for a READ of NIXL is free since {IDLE_S} s")
        own = self._arena.take()
        assert own is not None
        # NOTE: a READ that failed may still write to its slot, which is not used again.
        with _as_os_error():
            handle = self._prepare(place, offset, own, len(values))
            try:
                self._await(handle)
            finally:
                self._agent.release_xfer_handle(handle)
        values[:] = self._arena.memory[own : own + len(values)]
        self._give_back(own)

    def close(self) -> None:
        """Ends all reads."""
        self._closed.set()

    def forget(self, place: NixlPlace) -> None:
        """Forgets a peer with which a transfer has broken off."""
        with self._lock, contextlib.suppress(OSError), _as_os_error():
            if (known := self._peers.pop(place.agent, None)) is not None:
                self._agent.remove_remote_agent(known)

    def _prepare(self, place: NixlPlace, offset: int, own: int, num_bytes: int) -> object:
        """Returns the handle of a READ. If that cannot begin, its slot is free again."""
        agent = self._agent
        try:
            peer = self._known(place)
            to = agent.get_xfer_descs([(self._arena.address + own, num_bytes, 0)], "DRAM")
            source = agent.get_xfer_descs([(place.address + offset, num_bytes, 0)], "DRAM")
            return agent.initialize_xfer("READ", to, source, peer)
        except BaseException:
            self._give_back(own)
            raise

    def _give_back(self, own: int) -> None:
        self._arena.give_back(own)
        self._free.release()

    def _await(self, handle: object) -> None:
        until_s, num_looks = time.monotonic() + IDLE_S, 0
        state: str = self._agent.transfer(handle)
        while state == "PROC":
            num_looks += 1
            if num_looks > SPINS:
                if time.monotonic() > until_s:
                    raise TransferError(f"NIXL has not read a block in {IDLE_S} s")
                self._closed.wait(POLL_S)  # NIXL has nothing that a thread could wait for
            if self._closed.is_set():
                raise TransferError("the engine ends")
            state = self._agent.check_xfer_state(handle)
        if state != "DONE":
            raise TransferError(f"NIXL could not read a block: {state}")

    def _known(self, place: NixlPlace) -> str:
        with self._lock:
            if place.agent not in self._peers:
                found = self._agent.add_remote_agent(place.metadata)
                self._peers[place.agent] = found if isinstance(found, str) else found.decode()
            return self._peers[place.agent]


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    """WHY: NIXL's errors have no base of their own."""
    try:
        yield
    except (OSError, TransferError):
        raise
    except Exception as error:
        raise OSError(f"NIXL: {error!r}") from error
