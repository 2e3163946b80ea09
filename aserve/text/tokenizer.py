"""The tokenizer of a model, and a numeric one for models without tokenizer files.

In the numeric tokenizer token 17 is " 17", and decoded text encodes to the same ids again.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from aserve.text.detokenize import ByteStream, TextStream, TokenTexts
from aserve.text.template import ChatTemplate
from aserve.text.text_size import bytes_per_token, encodings
from aserve.text.window_stream import WindowStream

WORD_MARK = "\u2581"  # means a space in SentencePiece vocabularies
UNKNOWN = 0  # the numeric tokenizer's id for words that are not the number of a token


class Spelling(enum.Enum):
    """The way in which a vocabulary's strings spell the bytes of tokens."""

    BYTE_LEVEL = "each character is one byte"
    PIECES = "text with a mark for spaces, and <0xNN> for single bytes"
    CONTEXTUAL = "the text depends on neighbouring tokens, so the tokenizer's decoder is needed"


class TextTokenizer:
    """A tokenizer with its end tokens. `eos_ids` end an output. `bos_id` is put before a text if
    the tokenizer has not done so. No token stands for more than `bytes_per_token` bytes of a text.
    """

    __slots__ = (
        "_backend",
        "_spelling",
        "_texts",
        "bos_id",
        "bytes_per_token",
        "eos_ids",
        "special_ids",
        "special_texts",
        "vocab_size",
    )

    def __init__(
        self, backend: Tokenizer, *, eos_ids: Iterable[int] = (), bos_id: int | None = None
    ) -> None:
        added = backend.get_added_tokens_decoder()
        self._backend = backend
        self._spelling = spelling_of(backend)
        self._texts = TokenTexts(self._spell)
        self.bos_id = bos_id
        self.bytes_per_token = bytes_per_token(backend)
        self.eos_ids = tuple(eos_ids)
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.special_texts = tuple(token.content for token in added.values() if token.special)
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, with_special: bool) -> list[int]:
        """Encodes a text. `with_special` adds BOS and the like, which a rendered chat already has.
        Raises InvalidRequest for a text that the vocabulary cannot spell.
        """
        ids = encodings(self._backend, [text], with_special=with_special)[0].ids
        if with_special and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def decode(self, token_ids: Iterable[int], *, skip_special: bool = True) -> str:
        stream = self.stream(skip_special=skip_special)
        return "".join([*map(stream.feed, token_ids), stream.finish()])

    def stream(self, *, skip_special: bool = True, kept: Iterable[str] = ()) -> TextStream:
        """Returns a detokenizer for one output. With `skip_special` only those special tokens have
        a text that are `kept`.
        """
        skipped = self.special_ids if skip_special else frozenset[int]()
        kept_ids = [*map(self._backend.token_to_id, kept)]
        if kept_ids:  # else all outputs share the set
            skipped = skipped.difference(kept_ids)
        if self._spelling is Spelling.CONTEXTUAL:
            return WindowStream(self._decode_whole, skipped=skipped)
        return ByteStream(self._texts, skipped=skipped)

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of a token, special or not. Ids beyond the vocabulary have none."""
        piece = self._texts[token_id]
        return piece.encode() if isinstance(piece, str) else piece

    def token(self, token_id: int) -> str:
        """Returns the token as the vocabulary spells it."""
        return self._backend.id_to_token(token_id) or ""

    def _spell(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        match self._spelling:
            case Spelling.BYTE_LEVEL:
                return byte_level_bytes(token)
            case Spelling.PIECES:
                return piece_bytes(token)
            case Spelling.CONTEXTUAL:
                return self._backend.decode([token_id], skip_special_tokens=False).encode()

    def _decode_whole(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=False)


def spelling_of(backend: Tokenizer) -> Spelling:
    steps = list(_decoder_steps(backend))
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"}:
        return Spelling.BYTE_LEVEL
    replaced = [(step["pattern"], step["content"]) for step in steps if step["type"] == "Replace"]
    if any(pair != ({"String": WORD_MARK}, " ") for pair in replaced):
        return Spelling.CONTEXTUAL
    if (replaced or "Metaspace" in kinds) and kinds <= PIECE_STEPS:
        return Spelling.PIECES
    return Spelling.CONTEXTUAL


# WHY Strip is ignored: it removes the space before a text's first word, but an output continues a
# prompt and keeps the space.
PIECE_STEPS = frozenset({"Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"})


def _decoder_steps(backend: Tokenizer) -> Iterable[dict[str, Any]]:
    if backend.decoder is None:
        return []
    decoder: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def byte_level_bytes(token: str) -> bytes:
    """Returns a token's bytes. An added token may be plain text instead of byte characters."""
    try:
        return bytes([BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        return token.encode()


def piece_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes.fromhex(token[3:5])
    return token.replace(WORD_MARK, " ").encode()


def _byte_characters() -> dict[str, int]:
    """Returns the byte of each character in GPT-2's spelling: printable Latin-1 characters are
    themselves, and the other bytes are the characters from 256 on.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {chr(byte): byte for byte in printable}
    return characters | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_characters()


def numeric_tokenizer(vocab_size: int, *, eos_ids: Iterable[int] = ()) -> TextTokenizer:
    vocab = {f"{WORD_MARK}{token_id}": token_id for token_id in range(vocab_size)}
    backend = Tokenizer(models.WordLevel(vocab, unk_token=f"{WORD_MARK}{UNKNOWN}"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    backend.decoder = decoders.Metaspace()
    return TextTokenizer(backend, eos_ids=eos_ids)


def numeric_template() -> ChatTemplate:
    """Returns a chat template that joins the contents of all messages."""
    return ChatTemplate("{% for message in messages %}{{ message.content }} {% endfor %}")
