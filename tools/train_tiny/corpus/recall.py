"""Tables of key=value that are asked again after stories, so answers need the whole context."""

from random import Random

from tools.train_tiny.corpus.document import PLAIN, RANDOM, RECALLED, Document, Draw
from tools.train_tiny.corpus.names import made_word
from tools.train_tiny.corpus.split import drawn
from tools.train_tiny.corpus.stories import cast, story

KEYS = (
    "fox", "sun", "hat", "red", "key", "box", "cup", "map", "pen", "bag", "car", "bus", "sea",
    "sky", "ice", "oak", "bee", "ant", "cow", "pig", "hen", "cat", "dog", "owl", "bat", "jam",
    "tea", "egg", "pie", "nut", "fig", "door", "room", "tree", "leaf", "rock", "sand", "wind",
    "rain", "snow", "star", "moon", "lake", "hill", "road", "ship", "boat", "bell", "drum",
    "ring", "coin", "lamp", "fire", "gold", "blue", "green", "code", "port", "gate", "wall",
    "desk", "book", "page", "shoe", "milk", "salt", "rice", "corn", "bird", "fish", "frog",
    "bear", "wolf", "deer", "duck", "goat", "lion", "rose", "seed", "king",
)  # fmt: skip
TOKENS_PER_WORD = 1.3
TOKENS_PER_PAIR = 16  # a pair occurs once in the table and once as a question
TABLE_TOKENS = 6


def recall_document(draw: Draw) -> Document:
    """A table, and stories with questions between and after them. Each key is asked once."""
    rng = draw.rng
    most = max(1, min(8, (draw.room - 40) // TOKENS_PER_PAIR))
    table = pairs(draw, count=rng.randint(1, most))
    document = Document()
    for key, value in table.items():
        document.add(f"{key}=").add(value, RANDOM).add("\n")
    filler_room = max(0, draw.room - TABLE_TOKENS - len(table) * TOKENS_PER_PAIR)
    words = filler_words(draw, count=int(rng.uniform(0, filler_room) / TOKENS_PER_WORD))
    asked = list(table)
    rng.shuffle(asked)
    for index, (words_part, keys_part) in enumerate(parts_of(rng, words, asked)):
        document.add("\n" if index else "").add(" ".join(words_part))
        for key in keys_part:
            document.add("\n").add(f"{key}=", RANDOM).add(table[key], RECALLED)
    return document


def pairs(draw: Draw, *, count: int) -> dict[str, str]:
    """Distinct keys with values; most values are four digits."""
    rng = draw.rng
    keys = rng.sample(KEYS, count)
    if rng.random() < 0.15:
        keys = sorted({made_word(rng) for _ in range(count)})
        rng.shuffle(keys)
    shape = rng.random()
    return {key: value_of(draw, key, shape) for key in keys}


def value_of(draw: Draw, key: str, shape: float) -> str:
    rng = draw.rng
    if shape < 0.75:
        return digits_of(draw, key)
    if shape < 0.9:
        return "".join(rng.choices("0123456789", k=rng.choice((2, 3, 5, 6))))
    return f"{rng.choice(KEYS)} {rng.choice(KEYS)}"


def digits_of(draw: Draw, key: str) -> str:
    def candidate() -> tuple[str, str]:
        return key, "".join(draw.rng.choices("0123456789", k=4))

    return drawn(draw.split, "pair", candidate)[1]


def filler_words(draw: Draw, *, count: int) -> list[str]:
    """Returns the first `count` words of consecutive stories, cut anywhere."""
    words: list[str] = []
    while len(words) < count:
        words += story(draw, cast(draw)).split(" ")
    return words[:count]


def parts_of(rng: Random, words: list[str], keys: list[str]) -> list[tuple[list[str], list[str]]]:
    """Filler and questions cut into one to three parts; the last part asks at the very end."""
    num_parts = min(rng.choice((1, 1, 2, 3)), len(keys)) if words else 1
    if num_parts == 1:
        return [(words, keys)]
    word_cuts = [0, *sorted(rng.choices(range(len(words)), k=num_parts - 1)), len(words)]
    key_cuts = [0, *sorted(rng.sample(range(1, len(keys)), num_parts - 1)), len(keys)]
    return [
        (
            words[word_cuts[part] : word_cuts[part + 1]],
            keys[key_cuts[part] : key_cuts[part + 1]],
        )
        for part in range(num_parts)
    ]


def table_text(table: dict[str, str]) -> Document:
    document = Document()
    for index, (key, value) in enumerate(table.items()):
        document.add(", " if index else "", PLAIN).add(f"{key}=").add(value, RANDOM)
    return document
