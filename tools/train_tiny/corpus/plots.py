"""The plots of the stories: a loss, the dialogue about it, the help, and the lesson.

The fields of a template are h for the hero, f for the friend, o for the object, he/his/him for the
hero's pronouns, and fhe/fhis/fhim for the friend's.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Plot:
    objects: tuple[str, ...]
    problems: tuple[str, ...]
    complaints: tuple[str, ...]
    helps: tuple[str, ...]
    morals: tuple[str, ...]


PLOTS = (
    Plot(
        ("kite", "balloon", "hat"),
        (
            "a strong wind blew the {o} into a tall tree.",
            "the {o} flew up into a tree and got stuck.",
        ),
        ("My {o} is stuck in the tree", "I can not reach my {o}"),
        (
            "{f} climbed up the tree and brought the {o} down.",
            "{f} shook the tree until the {o} fell down.",
        ),
        ("a friend can reach what you can not reach alone", "it is good to ask for help"),
    ),
    Plot(
        ("boat", "raft", "ball"),
        (
            "the {o} drifted far out on the water.",
            "the {o} fell into the water and floated away.",
        ),
        ("My {o} is floating away", "I can not swim to my {o}"),
        (
            "{f} found a long stick and pulled the {o} back.",
            "{f} swam out and pushed the {o} back to the shore.",
        ),
        ("two friends are stronger than one", "it is good to stay calm"),
    ),
    Plot(
        ("key", "ring", "coin"),
        (
            "{h} dropped the {o} in the tall grass and could not find it.",
            "the {o} fell through a hole in {his} pocket and was gone.",
        ),
        ("I have lost my {o}", "I can not find my {o}"),
        (
            "{f} looked under every leaf and found the {o} near a stone.",
            "They looked together, and {f} saw the {o} shining in the sun.",
        ),
        ("four eyes see more than two", "you should never give up"),
    ),
    Plot(
        ("wagon", "bike", "cart"),
        (
            "a wheel came off the {o}, and it would not move.",
            "the {o} hit a big rock, and a wheel broke.",
        ),
        ("My {o} is broken", "The wheel came off my {o}"),
        (
            "{f} ran to get some tools and fixed the wheel.",
            "{f} held the {o} up while {h} put the wheel back on.",
        ),
        ("broken things can be fixed", "work is easy when you share it"),
    ),
    Plot(
        ("cake", "pie", "soup"),
        (
            "{h} wanted to make a big {o}, but there were no apples left.",
            "{h} began to make {o} for the party, but {he} had no milk.",
        ),
        ("I can not finish my {o}", "I need one more thing for my {o}"),
        (
            "{f} went home and came back with all that was needed.",
            "{f} gave {him} a full basket, and they made the {o} together.",
        ),
        ("sharing makes everything taste better", "it is good to give"),
    ),
    Plot(
        ("lamp", "lantern", "candle"),
        (
            "it got very dark, and the {o} went out.",
            "the {o} went out in the night, and {h} could not see the path home.",
        ),
        ("My {o} went out, and I am lost", "It is so dark without my {o}"),
        (
            "{f} lit the {o} again and walked home with {him}.",
            "{f} took {his} hand and showed {him} the way home.",
        ),
        ("you do not have to be afraid with a friend", "a small light can help a lot"),
    ),
    Plot(
        ("drum", "flute", "bell"),
        (
            "{h} tried to play a song on the {o}, but it sounded bad.",
            "everyone laughed when {h} played the {o}.",
        ),
        ("I can not play the {o}", "Nobody likes the sound of my {o}"),
        (
            "{f} showed {him} how to play, and they practiced all day.",
            "{f} sang along, and soon the {o} sounded lovely.",
        ),
        ("you get better when you practice", "a song is nicer with a friend"),
    ),
    Plot(
        ("blanket", "scarf", "coat"),
        (
            "it began to snow, and {h} saw that the {o} had a big hole.",
            "the {o} got caught on a branch and tore.",
        ),
        ("My {o} has a hole, and I am cold", "My {o} is torn"),
        (
            "{f} took a needle and some thread and closed the hole.",
            "{f} gave {him} a warm red patch, and they sewed it on the {o}.",
        ),
        ("kindness keeps you warm", "old things can be good again"),
    ),
    Plot(
        ("book", "map", "letter"),
        (
            "it began to rain, and the {o} got all wet.",
            "the {o} fell into a puddle.",
        ),
        ("My {o} is all wet", "I can not read my {o} now"),
        (
            "{f} put the {o} in the warm sun until it was dry.",
            "{f} dried the {o} by the fire, page by page.",
        ),
        ("most things look better the next day", "a little care goes a long way"),
    ),
    Plot(
        ("tower", "house", "castle"),
        (
            "{h} was building a little {o}, but it fell down again and again.",
            "a big wave of wind knocked down the {o} that {h} had built.",
        ),
        ("My {o} always falls down", "I worked so hard on my {o}"),
        (
            "{f} brought strong stones, and they built the {o} again.",
            "They put big stones at the bottom, and now the {o} stood still.",
        ),
        ("you can always start again", "good work takes time"),
    ),
)

OWNING = (
    "{h} had a {c} {o} and took it everywhere.",
    "{His} favorite thing was a {c} {o}.",
    "{h} loved {his} {c} {o}.",
)
COLORS = ("red", "blue", "green", "yellow", "little", "shiny")
TRAITS = ("brave", "kind", "clever", "curious", "happy", "shy", "gentle", "funny")
