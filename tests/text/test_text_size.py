"""The bound on a text's bytes: no text that fits is refused, and what is refused is not encoded."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers

from aserve.errors import ContextTooLong
from aserve.messages.requests import (
    ChatPrompt,
    GenerateRequest,
    Prompt,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
)
from aserve.text.lengths import PromptLimits
from aserve.text.prompt import MIN_TRUNCATED_BYTES, PromptEncoder
from aserve.text.template import ChatTemplate
from aserve.text.text_size import UNBOUNDED
from aserve.text.tokenizer import TextTokenizer
from aserve.tiny import MODEL_DIR
from tests.text.vocabularies import byte_level_backend, piece_backend, word_backend

BUNDLED = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))


def normalized(normalizer: normalizers.Normalizer) -> Tokenizer:
    backend = byte_level_backend()
    backend.normalizer = normalizer
    return backend


EXACT = {
    "byte-level": byte_level_backend(),
    "bundled": BUNDLED,
    "NFC": normalized(normalizers.NFC()),
    "NFKC": normalized(normalizers.NFKC()),
}
TEXTS = st.one_of(
    st.text(max_size=60),
    st.text(alphabet="stop hello\n", max_size=200),
    st.text(alphabet="\u1100\u1161\u11a8A\u030a\U0001d400\u03b1\u0313\u0300\u0345", max_size=60),
    st.text(alphabet=" ", max_size=100),
)


@pytest.mark.parametrize("name", EXACT)
@given(text=TEXTS)
def test_no_token_stands_for_more_than_bytes_per_token(name: str, text: str) -> None:
    tokenizer = TextTokenizer(EXACT[name])
    num_tokens = len(tokenizer.encode(text, with_special=False))
    assert len(text.encode()) <= num_tokens * tokenizer.bytes_per_token


def with_greedy_mark() -> Tokenizer:
    backend = byte_level_backend()
    backend.add_tokens([AddedToken("<end>", lstrip=True)])
    return backend


def without_spaces() -> Tokenizer:
    backend = byte_level_backend()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()]
    )
    return backend


@pytest.mark.parametrize("make", [piece_backend, word_backend, with_greedy_mark, without_spaces])
def test_a_vocabulary_that_may_drop_text_gets_a_wide_bound(make: object) -> None:
    assert callable(make)
    backend = make()
    longest = max(len(token.encode()) for token in backend.get_vocab())
    assert TextTokenizer(backend).bytes_per_token >= UNBOUNDED * longest // 2


class Counting(TextTokenizer):
    """Says what it was given to encode."""

    __slots__ = ("given",)

    def __init__(self) -> None:
        super().__init__(byte_level_backend())
        self.given: list[str] = []

    def encode(self, text: str, *, with_special: bool) -> list[int]:
        self.given.append(text)
        return super().encode(text, with_special=with_special)


def encoder() -> tuple[PromptEncoder, Counting]:
    tokenizer = Counting()
    template = ChatTemplate("{{ messages[0].content }}")
    limits = PromptLimits(16, tokenizer.vocab_size)
    return PromptEncoder(tokenizer, template=template, limits=limits), tokenizer


def request(prompt: Prompt, *, kept: int | None = None) -> GenerateRequest:
    sampling = SamplingParams(seed=1, max_tokens=1)
    return GenerateRequest("r", prompt, sampling, truncate_prompt_tokens=kept)


def chat(text: str) -> ChatPrompt:
    return ChatPrompt(b'[{"role": "user", "content": "%s"}]' % text.encode())


@pytest.mark.parametrize("letter", ["z", "한"])
@pytest.mark.parametrize("make", [TextPrompt, chat])
def test_a_text_that_cannot_fit_is_refused_and_not_encoded(make: object, letter: str) -> None:
    assert callable(make)
    made, tokenizer = encoder()
    most = 16 * tokenizer.bytes_per_token // len(letter.encode())
    with pytest.raises(ContextTooLong, match="maximum context length is 16 tokens"):
        made.prepare(request(make(letter * (most + 1))))
    assert tokenizer.given == []
    with pytest.raises(ContextTooLong, match="maximum context length is 16 tokens"):
        made.prepare(request(make(letter * most)))  # by its tokens
    assert len(tokenizer.given) == 1


def test_ids_that_cannot_fit_are_refused_before_anything_is_made_of_them() -> None:
    made, _ = encoder()
    with pytest.raises(ContextTooLong, match=r"18 tokens .17 in the prompt"):
        made.check_size(request(TokenPrompt((1,) * 17)))
    made.check_size(request(TokenPrompt((1,) * 17), kept=3))


def test_a_text_that_will_be_truncated_may_be_longer_within_a_bound() -> None:
    made, tokenizer = encoder()
    kept = made.prepare(request(TextPrompt("hello " * 1000), kept=3))
    assert kept.open.prompt_len == 3
    with pytest.raises(ContextTooLong, match="reduce the length"):
        made.prepare(request(TextPrompt("z" * (MIN_TRUNCATED_BYTES + 1)), kept=3))
    assert len(tokenizer.given) == 1


def test_a_text_that_is_only_counted_has_the_wide_bound() -> None:
    made, _ = encoder()
    assert len(made.encode(TextPrompt("hello " * 1000))) > 16
    with pytest.raises(ContextTooLong):
        made.encode(TextPrompt("z" * (MIN_TRUNCATED_BYTES + 1)))


def test_a_chat_with_too_many_bytes_is_refused_before_it_is_rendered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, tokenizer = encoder()
    rendered: list[int] = []
    real = ChatTemplate.render

    def render(template: ChatTemplate, messages: Any, **named: Any) -> str:
        rendered.append(len(messages[0]["content"]))
        return real(template, messages, **named)

    monkeypatch.setattr(ChatTemplate, "render", render)
    with pytest.raises(ContextTooLong, match=f"bytes of JSON, and at most {MIN_TRUNCATED_BYTES}"):
        made.prepare(request(chat("a" * MIN_TRUNCATED_BYTES)))
    assert (rendered, tokenizer.given) == ([], [])
    with pytest.raises(ContextTooLong, match=r"there are \d+ bytes in the messages"):
        made.prepare(request(chat("a" * (MIN_TRUNCATED_BYTES - 100))))
    assert rendered == [MIN_TRUNCATED_BYTES - 100]
