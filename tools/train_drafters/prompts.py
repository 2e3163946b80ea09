"""The prompts whose continuations train the drafters: openings of documents of the corpus."""

from random import Random

from tokenizers import Tokenizer

from tools.train_tiny.corpus.document import Draw
from tools.train_tiny.corpus.mixture import KINDS
from tools.train_tiny.corpus.names import ANIMALS, PEOPLE, PLACES, with_article
from tools.train_tiny.corpus.split import Split, is_held_out
from tools.train_tiny.tokenizer import ASSISTANT, BOS, chat_prompt

# Shares of prompts by kind of document. Stories are what the acceptance goals are about.
SHARES = {
    "story": 22, "two_persons": 16, "chat_two_persons": 14, "chat_asked_story": 8,
    "recall": 6, "conversation": 4, "chat_sum": 5, "chat_json": 5, "chat_tool": 4,
    "chat_recall": 3, "chat_counting": 2, "chat_code": 2, "chat_smalltalk": 2,
    "sums": 2, "records": 1, "counting": 1, "code": 1, "function": 1, "rewritten": 1,
}  # fmt: skip
ROOM = 320
LONG_ROOM = 700
LONG_SHARE = 0.06
MOST_OF_A_TEXT = 0.4


def training_prompt(rng: Random, tokenizer: Tokenizer) -> list[int]:
    """A chat up to one of its answers, or the first part of another document."""
    kind = rng.choices(list(SHARES), list(SHARES.values()))[0]
    room = LONG_ROOM if rng.random() < LONG_SHARE else ROOM
    text = KINDS[kind](Draw(rng, Split.TRAIN, room)).text
    ids = [BOS, *tokenizer.encode(text, add_special_tokens=False).ids][: room + 1]
    answers = [index + 1 for index, token_id in enumerate(ids) if token_id == ASSISTANT]
    if answers:
        return ids[: rng.choice(answers)]
    most = len(ids) - 1 if room == LONG_ROOM else int(len(ids) * MOST_OF_A_TEXT)
    return ids[: rng.randint(2, max(2, most))]


def story_prompts(tokenizer: Tokenizer, *, count: int, seed: int) -> list[list[int]]:
    """Openings of stories that no training text has, in plain and chat form in turn."""
    rng = Random(f"{seed}/story prompts")
    heroes = [(a, name) for a in ANIMALS for name in PEOPLE if is_held_out("hero", a, name)]
    requests = [(a, place) for a in ANIMALS for place in PLACES if is_held_out("request", a, place)]
    plain = [
        f"Once upon a time, there was {with_article(animal)} named {name}."
        for animal, name in rng.sample(heroes, count - count // 2)
    ]
    chat = [
        f"Write a story about {with_article(animal)} {place}."
        for animal, place in rng.sample(requests, count // 2)
    ]
    prompts = [tokenizer.encode(text).ids for text in plain]
    return prompts + [chat_prompt(tokenizer, text) for text in chat]
