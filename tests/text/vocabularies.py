"""Small tokenizers, made in the test: every kind of vocabulary that text/ tells apart."""

from __future__ import annotations

import functools
import string

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)

from aserve.text.tokenizer import TextTokenizer

EOS = "<|eos|>"
CORPUS = [
    "hello world, hello there",
    "stop sign stops the stopping",
    "größer 日本語 日本 🙂🙃",
    "ab abc abcd",
]


def byte_level_backend(*, vocab_size: int = 320) -> Tokenizer:
    """Byte-level BPE: 日 or 🙂 takes several tokens, and ids 0 and 1 are eos and a visible mark."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[EOS],
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<mark>", special=False, normalized=False)])
    return backend


@functools.cache
def byte_level_tokenizer() -> TextTokenizer:
    backend = byte_level_backend()
    eos_id = backend.token_to_id(EOS)
    assert eos_id is not None
    return TextTokenizer(backend, eos_ids=[eos_id])


def piece_backend() -> Tokenizer:
    """SentencePiece's form: a mark for spaces, and single bytes for what no piece covers."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((f"<0x{byte:02X}>", -20.0) for byte in range(256))]
    pieces += [
        ("\u2581hello", -1.0),
        ("\u2581world", -1.0),
        ("\u2581", -3.0),
        ("hel", -4.0),
        ("lo", -4.0),
    ]
    pieces += [(letter, -6.0) for letter in "abcdefghijklmnopqrstuvwxyz,.!"]
    backend = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["</s>"])
    return backend


def word_backend() -> Tokenizer:
    """WordPiece: its decoder looks at the neighbours, so tokens have no bytes of their own."""
    words = ["[UNK]", "[SEP]", "hello", "world", "play", "##ing", "##ed", "!", ",", "日", "本"]
    backend = Tokenizer(
        models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["[SEP]"])
    return backend


def bert_backend() -> Tokenizer:
    """[PAD] 0, [CLS] 1, [SEP] 2, then the letters a, b, c, ..., with BERT's pairs of texts."""
    words = ["[PAD]", "[CLS]", "[SEP]", *string.ascii_lowercase]
    vocab = {word: i for i, word in enumerate(words)}
    backend = Tokenizer(models.WordPiece(vocab, unk_token="[PAD]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    return backend
