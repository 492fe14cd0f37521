"""What a picture shows: its background and its things, with classical vision only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from PIL import Image, ImageFilter

from quality.render import DIGITS, coverage
from quality.scene import COLOURS, PALETTE, SHAPES

NAMES = (*SHAPES, *DIGITS)
RGB = np.array([PALETTE[c] for c in COLOURS], np.float32)

BORDER = 3  # pixels; nothing comes nearer to the edge than 3.3
DIFFERENT = 45.0  # RGB distance from the background; the nearest two colours are 99 apart
SPECK = 0.0025  # of the short side squared; the smallest thing covers four times that
CANVAS = 48  # pixels, for comparing outlines
CANVAS_AREA = 400.0  # pixels every outline is scaled to; the widest is then 42 wide
CORE = 9  # pixels deep inside a thing, far from mixed edges, that give its colour
PART = 0.2  # of a component's inside, from where on a second colour is a thing of its own


@dataclass(frozen=True, eq=False)
class Thing:
    """A connected region unlike the background; lengths in pixels.

    `likeness`: for each shape and digit the overlap (intersection over union, 0 … 1) of the
    outlines once both have the same area and centroid. `diameter` is that of the likest name.
    """

    colour: np.ndarray  # float32 [3], RGB
    likeness: dict[str, float]
    name: str
    area: float
    diameter: float
    x: float
    y: float
    left: float
    right: float


@dataclass(frozen=True)
class Seen:
    """`background`: float32 [3], RGB. `evenness`: the share of it that has this colour."""

    background: np.ndarray
    evenness: float
    things: list[Thing]


def look(picture: np.ndarray) -> Seen:
    """Takes a uint8 [H, W, 3] picture apart, its things sorted by falling area."""
    height, width, _ = picture.shape
    smooth = np.asarray(Image.fromarray(picture).filter(ImageFilter.MedianFilter(3)), np.float32)
    background = _background(smooth)
    away = np.sqrt(((smooth - background) ** 2).sum(-1))
    speck = SPECK * min(height, width) ** 2
    names = nearest_colour(smooth)
    regions = []
    for region in components(away > DIFFERENT):
        if region.sum() >= speck:
            regions += _split(region, names, smooth, speck)
    taken = np.zeros((height, width), bool)
    for region in regions:
        taken |= region
    things = [
        thing
        for region in regions
        if (thing := _thing(region, taken, picture, smooth, background)) is not None
    ]
    free = ~_grow(taken, 2)
    evenness = float((away[free] < DIFFERENT).mean()) if free.any() else 0.0
    return Seen(background, evenness, sorted(things, key=lambda t: -t.area))


def nearest_colour(rgb: np.ndarray) -> np.ndarray:
    """The index in COLOURS of the colour nearest to each of float32 [..., 3], int64 [...]."""
    # |rgb - c|² without the part that is the same for every colour.
    return ((RGB**2).sum(-1) - 2 * (rgb @ RGB.T)).argmin(-1)


def components(mask: np.ndarray) -> list[np.ndarray]:
    """The 4-connected parts of a bool [H, W] mask, each as a bool [H, W] mask."""
    parent: list[int] = []

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    runs: list[tuple[int, int, int]] = []  # row, start, end
    above: list[int] = []
    edges = np.diff(np.pad(mask, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    for row in range(mask.shape[0]):
        here = []
        starts, ends = np.flatnonzero(edges[row] == 1), np.flatnonzero(edges[row] == -1)
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            run = len(runs)
            runs.append((row, start, end))
            parent.append(run)
            here.append(run)
            for other in above:
                if runs[other][1] < end and start < runs[other][2]:
                    parent[root(other)] = root(run)
        above = here
    masks: dict[int, np.ndarray] = {}
    for run, (row, start, end) in enumerate(runs):
        masks.setdefault(root(run), np.zeros_like(mask))[row, start:end] = True
    return list(masks.values())


def _background(smooth: np.ndarray) -> np.ndarray:
    """The border's most frequent colour, as the median of the pixels that are nearest to it."""
    b = BORDER
    border = np.concatenate(
        [smooth[:b], smooth[-b:], smooth[:, :b].swapaxes(0, 1), smooth[:, -b:].swapaxes(0, 1)], 1
    ).reshape(-1, 3)
    names = nearest_colour(border)
    return np.median(border[names == np.bincount(names).argmax()], axis=0)


def _grow(mask: np.ndarray, pixels: int) -> np.ndarray:
    for _ in range(pixels):
        padded = np.pad(mask, 1)
        mask = mask | padded[:-2, 1:-1] | padded[2:, 1:-1] | padded[1:-1, :-2] | padded[1:-1, 2:]
    return mask


def _inside(region: np.ndarray) -> np.ndarray:
    """The region without its outermost pixels, whose colour is mixed."""
    return region & ~_grow(~region, 1)


def _split(
    region: np.ndarray, names: np.ndarray, smooth: np.ndarray, speck: float
) -> list[np.ndarray]:
    """The region, or its parts where two things of different colours touch.

    A colour's inside decides, since white's blurred rim on red is pink, but thin.
    """
    counts = np.array([_inside(region & (names == i)).sum() for i in range(len(COLOURS))])
    several = np.flatnonzero(counts >= max(PART * counts.sum(), speck / 2))
    if len(several) < 2:
        return [region]
    names = ((smooth[..., None, :] - RGB[several]) ** 2).sum(-1).argmin(-1)
    parts = [p for i in range(len(several)) for p in components(region & (names == i))]
    return [p for p in parts if p.sum() >= speck]


def _thing(
    region: np.ndarray,
    taken: np.ndarray,
    picture: np.ndarray,
    smooth: np.ndarray,
    background: np.ndarray,
) -> Thing | None:
    core = region
    while (deeper := _inside(core)).sum() >= CORE:
        core = deeper
    colour = np.median(smooth[core], axis=0)
    around = _grow(region, 2) & ~(taken & ~region)
    rows, columns = np.flatnonzero(around.any(1)), np.flatnonzero(around.any(0))
    box = np.s_[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    towards = colour - background
    mask = (picture[box] - background) @ towards / max(float(towards @ towards), 1.0)
    # Noise on either side of an edge counts for nothing.
    mask = np.where(around[box], ((mask - 0.15) / 0.7).clip(0, 1), 0)
    area = float(mask.sum())
    if area < 1:
        return None
    outline, x, y = _normalised(mask)
    overlaps = _overlaps(outline)
    best = int(overlaps.argmax())
    _, fills, offsets = _templates()
    diameter = float(np.sqrt(area / fills[best]))
    columns = np.flatnonzero(region.any(0))
    return Thing(
        colour=colour,
        likeness=dict(zip(NAMES, overlaps.tolist(), strict=True)),
        name=NAMES[best],
        area=area,
        diameter=diameter,
        x=box[1].start + x - float(offsets[best, 0]) * diameter,
        y=box[0].start + y - float(offsets[best, 1]) * diameter,
        left=float(columns[0]),
        right=float(columns[-1] + 1),
    )


def _normalised(mask: np.ndarray) -> tuple[np.ndarray, float, float]:
    """A mask float [h, w] at the canvas's area and centroid, float32 [CANVAS, CANVAS].

    Also the centroid, x and y in pixels of the mask.
    """
    height, width = mask.shape
    area = mask.sum()
    x = float((mask.sum(0) * (np.arange(width) + 0.5)).sum() / area)
    y = float((mask.sum(1) * (np.arange(height) + 0.5)).sum() / area)
    scale = float(np.sqrt(area / CANVAS_AREA))
    shift = scale * CANVAS / 2
    image = Image.fromarray(mask.astype(np.float32)).transform(
        (CANVAS, CANVAS),
        Image.Transform.AFFINE,
        (scale, 0, x - shift, 0, scale, y - shift),
        Image.Resampling.BILINEAR,
    )
    return np.asarray(image), x, y


@cache
def _templates() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each of NAMES its outline float32 [n, CANVAS, CANVAS], its area over its diameter
    squared float64 [n], and its centroid off its box's centre over its diameter float64 [n, 2]."""
    size, side = 40.0, 64  # about the pixels of a large shape
    outlines, fills, offsets = [], [], []
    for name in NAMES:
        mask, left, top = coverage(name, side / 2, side / 2, size, side, side)
        outline, x, y = _normalised(mask)
        outlines.append(outline)
        fills.append(mask.sum() / size**2)
        offsets.append(((x + left - side / 2) / size, (y + top - side / 2) / size))
    return np.stack(outlines), np.array(fills), np.array(offsets)


def _overlaps(outline: np.ndarray) -> np.ndarray:
    """Intersection over union with every template, float32 [n]."""
    templates = _templates()[0]
    both = np.minimum(templates, outline).sum((1, 2))
    return both / np.maximum(templates, outline).sum((1, 2))
