"""Stories of two persons, with consistent names, objects and pronouns."""

import re
from dataclasses import dataclass

from tools.train_tiny.corpus.document import ASKED, NEWCOMER, PLAIN, RECALLED, Document, Draw
from tools.train_tiny.corpus.names import ANIMALS, BOYS, GIRLS, PEOPLE, PLACES, with_article
from tools.train_tiny.corpus.plots import COLORS, OWNING, PLOTS, TRAITS, Plot
from tools.train_tiny.corpus.split import Split, drawn

FEELINGS = ("{h} was very sad.", "{h} did not know what to do.", "{h} sat down and cried.")
MEETINGS = (
    "Then {fa} named {f} came by.",
    "Just then, {fa} named {f} walked by.",
    "Soon {h} met {fa} named {f}.",
)
QUESTIONS = ('"What is wrong, {h}?" asked {f}.', '"Why are you so sad?" asked {f}.')
OFFERS = ('"I can help you," said {f}.', '"Do not worry, I will help you," said {f}.')
THANKS = ('"Thank you, {f}!" said {h}.', '"You are a true friend, {f}," said {h}.')
AFTERS = (
    "{h} and {f} were happy and danced until the sun went down.",
    "{h} was happy again, and {f} was happy too.",
    "Then {h} and {f} went home and ate together.",
)
ENDINGS = (
    "From that day on, {h} and {f} were best friends.",
    "{h} learned that {moral}.",
    "And {h} and {f} lived happily ever after.",
)
NEXT_DAYS = ("The next day, {h} went to see {f}.", "A week later, {h} and {f} met again.")
GOODBYES = ("The end.", "", "")
PRONOUNS = (("he", "his", "him"), ("she", "her", "her"))


@dataclass(frozen=True)
class Person:
    kind: str
    name: str

    @property
    def pronouns(self) -> tuple[str, str, str]:
        return PRONOUNS[self.name in GIRLS]


@dataclass(frozen=True)
class Cast:
    hero: Person
    friend: Person
    place: str


def story_document(draw: Draw) -> Document:
    return Document().add(story(draw, cast(draw)))


def cast(draw: Draw, *, animal: str | None = None, place: str | None = None) -> Cast:
    """The persons of a story. A held-out story has a hero (animal and name) unknown to training."""
    hero = person(draw, split=draw.split, animal=animal)
    friend = hero
    while friend.name == hero.name or friend.kind == hero.kind:
        friend = person(draw, split=Split.TRAIN)
    return Cast(hero, friend, place or draw.rng.choice(PLACES))


def person(draw: Draw, *, split: Split, animal: str | None = None) -> Person:
    def candidate() -> tuple[str, str]:
        return animal or draw.rng.choice(ANIMALS), draw.rng.choice(PEOPLE)

    kind, name = drawn(split, "hero", candidate)
    assert name in GIRLS or name in BOYS
    return Person(kind, name)


def story(draw: Draw, cast: Cast) -> str:
    pick = draw.rng.choice
    sentences = [*opening(draw, cast), *scene(draw, cast.hero, cast.friend, plot=pick(PLOTS))]
    if draw.room > 200 and draw.chance(0.25):
        names = {"h": cast.hero.name, "f": cast.friend.name}
        sentences.append(pick(NEXT_DAYS).format(**names))
        sentences += scene(draw, cast.friend, cast.hero, plot=pick(PLOTS), is_first=False)
    sentences.append(pick(GOODBYES))
    return " ".join(sentence for sentence in sentences if sentence)


def two_person_document(draw: Draw) -> Document:
    played = cast(draw)
    return marked_story(story(draw, played), played, newcomer=NEWCOMER)


def marked_story(text: str, cast: Cast, *, newcomer: float = PLAIN) -> Document:
    """The story, with weight on requested words, on names in actions, and on the second person."""
    asked = {cast.hero.kind, cast.place}
    names = {cast.hero.name, cast.friend.name}
    introduced: set[str] = set()
    document = Document()
    for part in re.split("\\b(" + "|".join(sorted(asked | names)) + ")\\b", text):
        weight = ASKED if part in asked else RECALLED if part in introduced else PLAIN
        if part == cast.friend.name and part not in introduced:
            weight = newcomer
        document.add(part, weight)
        introduced |= {part} & names
    return document


def opening(draw: Draw, cast: Cast) -> list[str]:
    hero = cast.hero
    pick = draw.rng.choice
    he = hero.pronouns[0]
    trait = pick(TRAITS)
    home = pick((f"{he.capitalize()} lived {cast.place}.", f"{hero.name} lived {cast.place}."))
    character = f"{hero.name} was very {trait}."
    if draw.chance(0.7):
        first = f"Once upon a time, there was {with_article(hero.kind)} named {hero.name}."
        return [first, home, character]
    return [f"There once was a {trait} {hero.kind} named {hero.name}.", home]


def scene(
    draw: Draw, hero: Person, friend: Person, *, plot: Plot, is_first: bool = True
) -> list[str]:
    """The hero loses something and the friend helps. In a second scene they know each other."""
    pick = draw.rng.choice
    fields = scene_fields(hero, friend)
    fields["o"] = pick(plot.objects)
    fields["c"] = pick(COLORS)
    fields["moral"] = pick(plot.morals)
    problem = pick(plot.problems)
    lines = [
        pick(OWNING if is_first else OWNING[:1]) if plot_is_owned(problem) else "",
        ("One day, " if is_first else "This time, ") + problem,
        pick(FEELINGS),
        pick(MEETINGS) if is_first else "",
        pick(QUESTIONS),
        f'"{pick(plot.complaints)}," said {{h}}.',
        pick(OFFERS),
        pick(plot.helps),
        pick(THANKS),
        pick(AFTERS),
        pick(ENDINGS),
    ]
    return [line.format(**fields) for line in lines]


def scene_fields(hero: Person, friend: Person) -> dict[str, str]:
    he, his, him = hero.pronouns
    return {
        "h": hero.name,
        "f": friend.name,
        "fa": with_article(friend.kind),
        "he": he,
        "his": his,
        "him": him,
        "His": his.capitalize(),
    }


def plot_is_owned(problem: str) -> bool:
    """A lost thing was owned before, unlike one that is being made."""
    return "make" not in problem and "buil" not in problem
