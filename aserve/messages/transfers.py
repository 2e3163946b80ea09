"""Messages about KV that goes to another engine or comes from one, as when prefill and decode run
apart, or that goes to the tiers below the prefix cache and comes back; and the protocol by which
such transfers read and write KV on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeAlias

from aserve.errors import ErrorInfo
from aserve.messages.base import Message, Record


class ReceiveKv(Message, frozen=True):
    """Asks for a transfer of the KV of a sequence's tokens from `first` on into its pages, but for
    that of the last one. No other sequence uses the pages from `first` on before KvReady or
    KvFailed, even if this one ends earlier.
    """

    request_id: str
    child: int
    first: int  # the KV of the tokens before it is there, as a prefix hit
    num_tokens: int
    token_ids: bytes  # int32 [num_tokens]
    namespace: str  # of the prefix cache
    # int32 [pages] for each layer group, 0 for a page that no later token sees
    pages: tuple[bytes, ...]


class SendKv(Message, frozen=True):
    """Says that the KV of a sequence's first `num_tokens` tokens is computed, and where it is. It
    is sent whenever that number grows. The pages may be read by work that the device is given
    before the next launch: later steps may write them.
    """

    request_id: str
    num_tokens: int
    pages: tuple[bytes, ...]  # as in ReceiveKv


class StreamKv(Message, frozen=True):
    """Says, right before the Launch, that a step computes the KV of a sequence's tokens `first` to
    `stop` - 1, which another engine wants. It may be read while the step runs. Whether it counts is
    known when SendKv comes.
    """

    request_id: str
    iteration: int
    first: int
    stop: int
    pages: tuple[bytes, ...]  # as in ReceiveKv


class KvReady(Message, frozen=True):
    """Answers ReceiveKv: the KV is in the sequence's pages. The last token is computed here."""

    request_id: str
    child: int


class KvFailed(Message, frozen=True):
    """Answers ReceiveKv: the KV did not come, and nothing writes to the pages any more. The
    sequence is computed here.
    """

    request_id: str
    child: int
    error: ErrorInfo


class SaveKv(Message, frozen=True):
    """Hands full pages of committed tokens down to the tiers. They may be read by work that the
    device is given before the next launch: later steps may write them.
    """

    keys: bytes  # one after the other; among the pages of a sequence the last one goes first
    pages: tuple[bytes, ...]  # int32 [pages] for each layer group


class LoadKv(Message, frozen=True):
    """Asks the tiers for the KV of a sequence's pages from page index `first` on. No other sequence
    uses them before KvLoaded, even if this one ends earlier.
    """

    request_id: str
    child: int
    first: int
    keys: bytes  # of these pages, one after the other
    token_ids: bytes  # int32 [pages * page_size]
    # int32 [pages] for each layer group, 0 for a page that no later token sees
    pages: tuple[bytes, ...]


class KvLoaded(Message, frozen=True):
    """Answers LoadKv: the KV of the sequence's first `num_pages` pages is there, which may be less
    than was asked for, and nothing writes to the pages any more.
    """

    request_id: str
    child: int
    num_pages: int


class TiersChanged(Message, frozen=True):
    """Keys of pages that the tiers have from now on, and of those that they have no longer, or did
    not take.
    """

    added: bytes = b""
    removed: bytes = b""


KvEffect: TypeAlias = ReceiveKv | SendKv | StreamKv | SaveKv | LoadKv
KvAnswer: TypeAlias = KvReady | KvFailed | KvLoaded | TiersChanged


class KvLayer(Record, frozen=True):
    """A layer that stores KV: the bytes of a token in each of its pools. With `is_divided`, each
    tensor-parallel rank has some of the heads, or shares one with its neighbours.
    """

    group: int
    slot_bytes: tuple[int, ...]
    is_divided: bool = False


class KvLayout(Record, frozen=True):
    """Describes what a transfer reads and writes: the layers in their order. Of each layer come
    keys [tokens, bytes of a slot], and then values, or the index keys of sparse layers.
    """

    dtypes: tuple[str, ...]  # of the model's KV, and of a drafter's; with those of index keys
    layers: tuple[KvLayer, ...]

    @property
    def text(self) -> str:
        """The same on both sides of a transfer, however many ranks they have."""
        shapes = [(layer.group, layer.slot_bytes) for layer in self.layers]
        return f"{self.dtypes} {shapes}"

    @property
    def layer_bytes(self) -> tuple[int, ...]:
        return tuple(sum(layer.slot_bytes) for layer in self.layers)

    @property
    def pool_shapes(self) -> tuple[tuple[int, int], ...]:
        return tuple((1, size) for layer in self.layers for size in layer.slot_bytes)

    def of_all(self, num_parts: int) -> KvLayout:
        """Returns the layout of all ranks together, where this is that of one of `num_parts`."""
        layers = [
            KvLayer(layer.group, tuple(num_parts * size for size in layer.slot_bytes), True)
            if layer.is_divided
            else layer
            for layer in self.layers
        ]
        return KvLayout(self.dtypes, tuple(layers))


# Returns the bytes [num_tokens * bytes_per_token] once the device has copied them.
HostKv: TypeAlias = Callable[[], memoryview]
OnLayer: TypeAlias = Callable[[int, HostKv], None]


class KvAccess(Protocol):
    """The KV pools of an executor, of the drafter, too. A `read` is ordered with the launches of
    steps: it runs behind what was launched before. A `write` is there for what is launched after
    its future is done. It may run beside steps that were launched before, so whoever writes waits
    first for those that may name its pages (`barrier`). Any thread may ask. A future fails if the
    executor's thread has ended.
    """

    geometry: str  # the same on both sides of a transfer
    bytes_per_token: int
    # layers and bytes of a slot, for each pool in the order of `read`, which gives for each pool
    # [layers, tokens, bytes of a slot]
    pool_shapes: tuple[tuple[int, int], ...]

    def barrier(self) -> Future[None]:
        """The future is done when all that was launched before has run."""

    def read(self, pages: tuple[bytes, ...], first: int, stop: int) -> Future[HostKv]:
        """Reads the KV of tokens first to stop - 1 of a sequence. `pages` has its pages, int32, for
        each layer group.
        """

    def write(
        self, pages: tuple[bytes, ...], first: int, token_ids: bytes, values: memoryview
    ) -> Future[None]:
        """Writes the KV and the ids, int32, of tokens from `first` on. `values` are the bytes that
        `read` gave.
        """


class LayeredKvAccess(KvAccess, Protocol):
    """KV that can also be read and written layer by layer, and while a step computes it."""

    layout: KvLayout
    layer_bytes: tuple[int, ...]  # of a token, for each layer in the order of `read`

    def read(
        self, pages: tuple[bytes, ...], first: int, stop: int, from_layer: int = 0
    ) -> Future[HostKv]:
        """Leaves out the layers before `from_layer`."""

    def write(
        self,
        pages: tuple[bytes, ...],
        first: int,
        token_ids: bytes,
        values: memoryview,
        layers: range | None = None,
    ) -> Future[None]:
        """`values` are those of these layers, or of all."""

    def stream(
        self, iteration: int, pages: tuple[bytes, ...], tokens: range, on_layer: OnLayer
    ) -> None:
        """Asks for the KV of tokens that step `iteration`, which is launched next, computes:
        `on_layer` is called for a layer when the step has stored its KV, on the executor's thread.
        It is never called for the last layer, and not at all if the step does not run layer by
        layer.
        """
