"""What a request may ask of its sampling and its answer: the official client and a real model."""

from __future__ import annotations

import itertools
from typing import Any

import openai
import pytest

from aserve.text.bad_words import bad_word_ids
from aserve.text.load import load_tokenizer
from aserve.tiny import MODEL_DIR

pytestmark = pytest.mark.slow

TOKENIZER = load_tokenizer(MODEL_DIR)
STORY = "Once upon a time, there was a rabbit named Mia."


async def story(client: openai.AsyncOpenAI, **fields: Any) -> dict[str, Any]:
    extra = {"return_token_ids": True, "ignore_eos": True, **fields}
    answer = await client.completions.create(
        model="aserve-tiny", prompt=STORY, max_tokens=40, temperature=0, extra_body=extra
    )
    choice: dict[str, Any] = answer.choices[0].model_dump()
    return choice | {"token_ids": tuple(choice["token_ids"])}


async def test_bad_words_are_not_said(client: openai.AsyncOpenAI) -> None:
    """Each of the words that it would say, one after the other: of one token and of many. Other
    spellings of the same letters are other words.
    """
    banned: list[str] = []
    for _ in range(6):
        choice = await story(client, bad_words=banned)
        token_ids = choice["token_ids"]
        for word in bad_word_ids(banned, TOKENIZER):
            assert word not in {token_ids[i : i + len(word)] for i in range(len(token_ids))}
        banned.append(max(choice["text"].split(), key=len))
    assert max(map(len, bad_word_ids(banned, TOKENIZER))) > 2


async def test_a_bad_word_is_banned_only_after_its_first_tokens(
    client: openai.AsyncOpenAI,
) -> None:
    token_ids = (await story(client))["token_ids"]
    pair = TOKENIZER.decode(token_ids[:2])
    assert token_ids[:2] in bad_word_ids([pair], TOKENIZER)
    changed = (await story(client, bad_words=[pair]))["token_ids"]
    assert token_ids[:2] not in itertools.pairwise(changed)
    assert changed[0] == token_ids[0]


async def test_only_allowed_tokens_are_said(client: openai.AsyncOpenAI) -> None:
    allowed = sorted((await story(client))["token_ids"])[:6]
    chosen = (await story(client, allowed_token_ids=allowed, temperature=1.5))["token_ids"]
    assert len(chosen) == 40
    assert set(chosen) <= set(allowed)


async def test_a_grammar_wins_where_bans_would_leave_it_nothing(
    client: openai.AsyncOpenAI,
) -> None:
    choices = {"structured_outputs": {"choice": ["yes", "no"]}}
    assert (await story(client, bad_words=["yes", "no"], **choices))["text"] in ("yes", "no")
    assert (await story(client, allowed_token_ids=[300], **choices))["text"] in ("yes", "no")
    texts = {(await story(client, bad_words=[word], **choices))["text"] for word in ("yes", "no")}
    assert texts == {"yes", "no"}


async def test_tokens_and_models_are_found_by_the_official_client(
    client: openai.AsyncOpenAI,
) -> None:
    (listed,) = (await client.models.list()).data
    assert await client.models.retrieve(listed.id) == listed
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other/model")
    tokens = await client.post("/tokenize", body={"prompt": STORY}, cast_to=dict[str, Any])
    assert tokens["tokens"] == TOKENIZER.encode(STORY, with_special=True)
    assert tokens["max_model_len"] == listed.model_dump()["max_model_len"]
    ids = {"tokens": tokens["tokens"]}
    back = await client.post("/detokenize", body=ids, cast_to=dict[str, Any])
    assert back == {"prompt": f"<|bos|>{STORY}"}, "special tokens are shown"


async def test_who_knows_the_salt_shares_the_cache(client: openai.AsyncOpenAI) -> None:
    async def cached_tokens(salt: str) -> int:
        answer = await client.completions.create(
            model="aserve-tiny", prompt=STORY * 4, max_tokens=1, extra_body={"cache_salt": salt}
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    assert await cached_tokens("mine") == 0
    assert await cached_tokens("mine") > 0
    assert await cached_tokens("other") == 0
