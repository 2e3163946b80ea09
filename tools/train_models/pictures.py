"""Pictures of coloured shapes with captions, drawn by numpy: 64 x 64 pixels, one or two shapes.

One shape stands in one of nine places, "a red circle at the top left". Two stand side by side or
one above the other, and the caption names the left or the upper one first.
"""

from dataclasses import dataclass
from random import Random

import numpy as np
from numpy.typing import NDArray

from tools.train_tiny.corpus.split import Split, drawn

SIDE = 64
CELLS = 3
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 80, 220),
    "yellow": (235, 215, 50),
}
SHAPES = ("circle", "square", "triangle")
PLACES = (
    "at the top left", "at the top", "at the top right",
    "on the left", "in the middle", "on the right",
    "at the bottom left", "at the bottom", "at the bottom right",
)  # fmt: skip
TWO_SHAPES = 0.6
JITTER = 1.5
RADIUS = (7.0, 9.0)


@dataclass(frozen=True)
class Picture:
    pixels: NDArray[np.uint8]  # [height, width, 3]
    caption: str


def picture(rng: Random, split: Split) -> Picture:
    """Draws a picture whose caption is on this side of the split."""
    (caption,) = drawn(split, "caption", lambda: (drawn_caption(rng),))
    return Picture(drawn_pixels(rng, caption), caption)


def drawn_caption(rng: Random) -> str:
    first = drawn_object(rng)
    if rng.random() >= TWO_SHAPES:
        return f"{first} {rng.choice(PLACES)}"
    return f"{first} {rng.choice(('left of', 'above'))} {drawn_object(rng)}"


def drawn_object(rng: Random) -> str:
    return f"a {rng.choice(list(COLOURS))} {rng.choice(SHAPES)}"


def drawn_pixels(rng: Random, caption: str) -> NDArray[np.uint8]:
    grey = rng.randint(10, 60)
    pixels = np.full((SIDE, SIDE, 3), grey, dtype=np.uint8)
    for text, (row, column) in placed_objects(rng, caption):
        _, colour, shape = text.split()
        paint(pixels, rng, (row, column), colour=colour, shape=shape)
    return pixels


def placed_objects(rng: Random, caption: str) -> list[tuple[str, tuple[int, int]]]:
    """Returns each object of a caption with its cell (row, column)."""
    for relation in (" left of ", " above "):
        if relation in caption:
            first, second = caption.split(relation)
            near, far = sorted(rng.sample(range(CELLS), 2))
            across = rng.randrange(CELLS)
            cells = ((across, near), (across, far))
            if relation == " above ":
                cells = ((near, across), (far, across))
            return [(first, cells[0]), (second, cells[1])]
    words = caption.split()
    place = PLACES.index(" ".join(words[3:]))
    return [(" ".join(words[:3]), (place // CELLS, place % CELLS))]


def paint(
    pixels: NDArray[np.uint8], rng: Random, cell: tuple[int, int], *, colour: str, shape: str
) -> None:
    size = SIDE / CELLS
    middle = [(part + 0.5) * size + rng.uniform(-JITTER, JITTER) for part in cell]
    radius = rng.uniform(*RADIUS)
    rows, columns = np.mgrid[0:SIDE, 0:SIDE]
    down, right = (rows + 0.5 - middle[0]) / radius, (columns + 0.5 - middle[1]) / radius
    inside = {
        "circle": down**2 + right**2 < 1,
        "square": np.maximum(abs(down), abs(right)) < 0.85,
        "triangle": (down < 0.9) & (abs(right) < (down + 1) / 2),
    }[shape]
    shade = [min(255, max(0, value + rng.randint(-15, 15))) for value in COLOURS[colour]]
    pixels[inside] = shade
