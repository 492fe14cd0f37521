"""Scenes: one to three coloured shapes and perhaps a number on a plain background."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Far apart in RGB (nearest pair: orange and yellow, 99), so that a slight shift changes no name.
PALETTE: dict[str, tuple[int, int, int]] = {
    "red": (215, 25, 35),
    "orange": (250, 130, 10),
    "yellow": (250, 225, 40),
    "green": (25, 150, 65),
    "blue": (30, 75, 215),
    "purple": (135, 40, 175),
    "pink": (255, 130, 190),
    "black": (20, 20, 20),
    "white": (250, 250, 250),
}
COLOURS = tuple(PALETTE)
SHAPES = ("circle", "square", "triangle", "diamond", "star", "heart", "cross")

# Diameter over the picture's short side.
SIZES = {"small": 0.18, "medium": 0.26, "large": 0.37}

# Centre (x, y), each 0 … 1 of the picture.
PLACES: dict[str, tuple[float, float]] = {
    "centre": (0.5, 0.5),
    "left": (0.2, 0.5),
    "right": (0.8, 0.5),
    "top": (0.5, 0.2),
    "bottom": (0.5, 0.8),
    "top left": (0.2, 0.2),
    "top right": (0.8, 0.2),
    "bottom left": (0.2, 0.8),
    "bottom right": (0.8, 0.8),
}
RELATIONS = ("above", "below", "left of", "right of")

PICTURE_SIZES = ((128, 128), (112, 144), (144, 112))  # (width, height), multiples of 16

# A number's digits, over the short side; every digit fills its whole box.
DIGIT_HEIGHT = 0.30
DIGIT_WIDTH = 0.19
DIGIT_GAP = 0.07

JITTER = 0.02  # of the picture, either way around a place
MARGIN = 0.03  # of the short side, between anything and the picture's edge
GAP = 0.04  # of the short side, between the boxes of any two things

# What a caption that leaves something out stands for in training. The judge leaves it open.
DEFAULT_SIZE = "medium"
DEFAULT_BACKGROUND = "white"
DEFAULT_PLACE = "centre"  # of a single object
DEFAULT_NUMBER_PLACE = "bottom"


@dataclass(frozen=True)
class Object:
    """One shape; `x`, `y` is the centre of its box, 0 … 1 of the picture's width and height."""

    shape: str
    colour: str
    size: str
    x: float
    y: float


@dataclass(frozen=True)
class Scene:
    """A picture's contents; `width`, `height` in pixels.

    `number_x`, `number_y` is the centre of the number's box, 0 … 1, and unused without a number.
    """

    width: int
    height: int
    background: str
    objects: tuple[Object, ...]
    number: str | None = None
    number_x: float = 0.5
    number_y: float = 0.5


def ink(background: str) -> str:
    """The colour a number has on this background: black on light ones, white on dark ones."""
    return "black" if background in ("white", "yellow", "pink", "orange") else "white"


def place_of(x: float, y: float) -> str:
    """The named place nearest to (x, y)."""
    return min(PLACES, key=lambda p: max(abs(PLACES[p][0] - x), abs(PLACES[p][1] - y)))


def number_box(number: str) -> tuple[float, float]:
    """(width, height) of a number, over the picture's short side."""
    return len(number) * DIGIT_WIDTH + (len(number) - 1) * DIGIT_GAP, DIGIT_HEIGHT


def random_scene(rng: np.random.Generator, size: tuple[int, int] | None = None) -> Scene:
    """A random scene, of `size` (width, height) pixels or one of `PICTURE_SIZES`.

    Nothing overlaps or is cut off, no object has the background's colour, and no two objects
    have both colour and shape in common. White backgrounds, single objects in the centre and
    pairs on opposite sides are more frequent than chance, as they are in what people ask for.
    """
    width, height = PICTURE_SIZES[rng.integers(len(PICTURE_SIZES))] if size is None else size
    background = DEFAULT_BACKGROUND if rng.random() < 0.2 else _pick(rng, COLOURS)
    number = None
    if rng.random() < 0.3:
        number = str(rng.integers(10)) if rng.random() < 0.5 else str(rng.integers(10, 100))
    count = int(rng.integers(1, 4 if number is None else 3))
    looks = _looks(rng, count, background)
    while True:  # about every third layout fits
        names = _places(rng, count, number is not None)
        sizes = [_pick(rng, tuple(SIZES)) for _ in range(count)]
        boxes = [(SIZES[s], SIZES[s]) for s in sizes]
        if number is not None:
            boxes.append(number_box(number))
        centres = [_near(rng, p, b, width, height) for p, b in zip(names, boxes, strict=True)]
        if _apart(centres, boxes, width, height):
            break
    objects = tuple(
        Object(shape, colour, s, x, y)
        for (colour, shape), s, (x, y) in zip(looks, sizes, centres, strict=False)
    )
    number_x, number_y = centres[-1] if number is not None else (0.5, 0.5)
    return Scene(width, height, background, objects, number, number_x, number_y)


def _pick(rng: np.random.Generator, names: tuple[str, ...]) -> str:
    return names[rng.integers(len(names))]


def _looks(rng: np.random.Generator, count: int, background: str) -> list[tuple[str, str]]:
    colours = tuple(c for c in COLOURS if c != background)
    looks: list[tuple[str, str]] = []
    while len(looks) < count:
        look = (_pick(rng, colours), _pick(rng, SHAPES))
        if look not in looks:
            looks.append(look)
    return looks


def _places(rng: np.random.Generator, count: int, numbered: bool) -> list[str]:
    """Distinct places for the objects and, last, for a number."""
    if count == 1 and rng.random() < 0.3:
        names = [DEFAULT_PLACE]
    elif count == 2 and rng.random() < 0.5:
        names = ["left", "right"] if rng.random() < 0.5 else ["top", "bottom"]
        if rng.random() < 0.5:
            names.reverse()
    else:
        names = []
    others = [p for p in PLACES if p not in names]
    more = rng.permutation(len(others))[: count + numbered - len(names)]
    return names + [others[i] for i in more]


def _near(
    rng: np.random.Generator, place: str, box: tuple[float, float], width: int, height: int
) -> tuple[float, float]:
    """A jittered centre near a place, with the whole box inside the picture."""
    short = min(width, height)
    centre = []
    for at, extent, side in zip(PLACES[place], box, (width, height), strict=True):
        room = (extent / 2 + MARGIN) * short / side
        at = min(max(at, room), 1 - room) + rng.uniform(-JITTER, JITTER)
        centre.append(float(min(max(at, room), 1 - room)))
    return centre[0], centre[1]


def _apart(
    centres: list[tuple[float, float]],
    boxes: list[tuple[float, float]],
    width: int,
    height: int,
) -> bool:
    short = min(width, height)
    for i in range(len(boxes)):
        for j in range(i):
            dx = abs(centres[i][0] - centres[j][0]) * width / short
            dy = abs(centres[i][1] - centres[j][1]) * height / short
            if (
                dx < (boxes[i][0] + boxes[j][0]) / 2 + GAP
                and dy < (boxes[i][1] + boxes[j][1]) / 2 + GAP
            ):
                return False
    return True
