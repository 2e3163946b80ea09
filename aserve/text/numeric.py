"""A tokenizer for models that have none: token 17 is written " 17".

Must not know a model directory. Whatever comes out can be sent in again, and gives the same ids.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from aserve.text.template import ChatTemplate
from aserve.text.tokenizer import WORD_MARK, TextTokenizer

UNKNOWN = 0  # the id of every word that is no token's number


def numeric_tokenizer(vocab_size: int, *, eos_ids: Iterable[int] = ()) -> TextTokenizer:
    vocab = {f"{WORD_MARK}{token_id}": token_id for token_id in range(vocab_size)}
    backend = Tokenizer(models.WordLevel(vocab, unk_token=f"{WORD_MARK}{UNKNOWN}"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    backend.decoder = decoders.Metaspace()
    return TextTokenizer(backend, eos_ids=eos_ids)


def numeric_template() -> ChatTemplate:
    """The words of all messages, one after the other."""
    return ChatTemplate("{% for message in messages %}{{ message.content }} {% endfor %}")
