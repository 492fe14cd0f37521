"""Draws scenes: `render` for whole pictures, `coverage` for one shape or digit."""

from __future__ import annotations

from functools import cache

import numpy as np
from PIL import Image, ImageDraw

from quality.scene import (
    DIGIT_GAP,
    DIGIT_HEIGHT,
    DIGIT_WIDTH,
    PALETTE,
    SIZES,
    Scene,
    ink,
    number_box,
)

SUPERSAMPLING = 8  # 64 levels of coverage at an edge
STROKE = 0.17  # of a digit's height

# Which of the seven segments a digit lights: top, upper left, upper right, middle, lower left,
# lower right, bottom. 1 is drawn apart, with a foot: a bare bar is no more than a speck.
SEGMENTS = {
    "0": "1110111",
    "2": "1011101",
    "3": "1011011",
    "4": "0111010",
    "5": "1101011",
    "6": "1101111",
    "7": "1010010",
    "8": "1111111",
    "9": "1111011",
}
DIGITS = "0123456789"


@cache
def outline(name: str) -> tuple[np.ndarray, ...]:
    """The polygons (float64 [points, 2], x and y) whose union is a shape or a digit.

    A shape's box is one unit wide or high, a digit's one unit high; its centre is the origin
    and y points down.
    """
    if name in DIGITS:
        return tuple(np.array(p) for p in _digit(name))
    turn = 2 * np.pi
    if name == "circle":
        angle = np.linspace(0, turn, 48, endpoint=False)
        return (0.5 * np.stack([np.cos(angle), np.sin(angle)], -1),)
    if name == "star":
        angle = np.arange(10) * turn / 10 - turn / 4
        radius = np.where(np.arange(10) % 2 == 0, 1.0, 0.45)
        return (_boxed(np.stack([radius * np.cos(angle), radius * np.sin(angle)], -1)),)
    if name == "heart":
        t = np.linspace(0, turn, 48, endpoint=False)
        y = 13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t)
        return (_boxed(np.stack([16 * np.sin(t) ** 3, -y], -1)),)
    if name == "cross":
        return (_bar(-0.5, -0.17, 0.5, 0.17), _bar(-0.17, -0.5, 0.17, 0.5))
    corners = {
        "square": [(-0.46, -0.46), (0.46, -0.46), (0.46, 0.46), (-0.46, 0.46)],
        "triangle": [(0.0, -0.45), (0.5, 0.45), (-0.5, 0.45)],
        "diamond": [(0.0, -0.5), (0.4, 0.0), (0.0, 0.5), (-0.4, 0.0)],
    }
    return (np.array(corners[name]),)


def _boxed(points: np.ndarray) -> np.ndarray:
    low, high = points.min(0), points.max(0)
    return (points - (low + high) / 2) / (high - low).max()


def _bar(left: float, top: float, right: float, bottom: float) -> np.ndarray:
    return np.array([(left, top), (right, top), (right, bottom), (left, bottom)])


def _digit(name: str) -> list[np.ndarray]:
    right, half = DIGIT_WIDTH / DIGIT_HEIGHT / 2, STROKE / 2
    if name == "1":
        return [
            _bar(-half, -0.5, half, 0.5),
            _bar(-right, 0.5 - STROKE, right, 0.5),
            _bar(-right, -0.5, half, -0.5 + STROKE),
        ]
    bars = (
        _bar(-right, -0.5, right, -0.5 + STROKE),
        _bar(-right, -0.5, -right + STROKE, half),
        _bar(right - STROKE, -0.5, right, half),
        _bar(-right, -half, right, half),
        _bar(-right, -half, -right + STROKE, 0.5),
        _bar(right - STROKE, -half, right, 0.5),
        _bar(-right, 0.5 - STROKE, right, 0.5),
    )
    return [bar for bar, lit in zip(bars, SEGMENTS[name], strict=True) if lit == "1"]


def coverage(
    name: str, x: float, y: float, size: float, width: int, height: int
) -> tuple[np.ndarray, int, int]:
    """How much of each pixel a shape or digit covers, in the smallest box that holds it.

    `x`, `y`: centre, and `size`: diameter or a digit's height, all in pixels of a picture of
    `width` by `height`. Returns the coverage, float32 [h, w] in 0 … 1, and the box's left and
    top pixel.
    """
    reach = size / 2 + 1
    left, right = max(int(x - reach), 0), min(int(x + reach) + 1, width)
    top, bottom = max(int(y - reach), 0), min(int(y + reach) + 1, height)
    fine = Image.new("L", ((right - left) * SUPERSAMPLING, (bottom - top) * SUPERSAMPLING))
    draw = ImageDraw.Draw(fine)
    for polygon in outline(name):
        points = (polygon * size + (x - left, y - top)) * SUPERSAMPLING - 0.5
        draw.polygon(points.ravel().tolist(), fill=255)
    mask = np.asarray(fine.reduce(SUPERSAMPLING), np.float32) / 255
    return mask, left, top


def render(scene: Scene) -> np.ndarray:
    """The scene's picture, uint8 [height, width, 3]."""
    picture = np.empty((scene.height, scene.width, 3), np.float32)
    picture[:] = PALETTE[scene.background]
    short = min(scene.width, scene.height)
    things = [
        (o.shape, o.colour, o.x * scene.width, o.y * scene.height, SIZES[o.size] * short)
        for o in scene.objects
    ]
    if scene.number is not None:
        first = (
            scene.number_x * scene.width - (number_box(scene.number)[0] - DIGIT_WIDTH) / 2 * short
        )
        step = (DIGIT_WIDTH + DIGIT_GAP) * short
        colour, y = ink(scene.background), scene.number_y * scene.height
        for i, digit in enumerate(scene.number):
            things.append((digit, colour, first + i * step, y, DIGIT_HEIGHT * short))
    for name, colour, x, y, size in things:
        mask, left, top = coverage(name, x, y, size, scene.width, scene.height)
        box = picture[top : top + mask.shape[0], left : left + mask.shape[1]]
        box += mask[..., None] * (np.array(PALETTE[colour], np.float32) - box)
    return (picture + 0.5).astype(np.uint8)
