"""How well a picture shows what its caption demands: a score in 0 … 1, and its parts.

    verdict = judge("a red circle on the left, white background", picture)
    verdict.score, verdict.parts["colour"]

Each demanded object is paired with the thing in the picture that fits it best. An object's own
score is the product of its aspects, each with a floor (`FLOORS`): a wrong colour leaves a fifth,
a wrong size more than half. The picture's score is the mean over the objects, times a factor
each for things nobody asked for, a wrong background and a wrong number. A product, not a mean:
pictures for another prompt, which always have something right, stay near nought.
What a caption leaves open is not judged.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations

import numpy as np

from quality.captions import Description, Relation, read
from quality.render import DIGITS
from quality.scene import COLOURS, PLACES, SHAPES, SIZES
from quality.vision import RGB, SPECK, Seen, Thing, look

ASPECTS = ("objects", "colour", "shape", "size", "place", "background", "number")

# What a score keeps when one aspect is all wrong.
FLOORS = {
    "colour": 0.2,
    "shape": 0.2,
    "size": 0.6,
    "place": 0.4,
    "background": 0.5,
    "number": 0.3,
    "place of the number": 0.7,
}
EXTRA = 0.6  # kept for each thing nobody asked for
CANDIDATES = 6  # the largest things that are tried for the objects


@dataclass(frozen=True)
class Verdict:
    """`score` in 0 … 1, and for each aspect that the caption demands its part in 0 … 1.

    "objects": the share of the demanded objects that are there, less for extra things. "colour",
    "shape", "size" and "place" are means over those that are there (0 without any), "place"
    with the relations' and the number's. "number" is the share of its digits that are right.
    """

    score: float
    parts: dict[str, float]


def judge(prompt: str, picture: np.ndarray) -> Verdict:
    """Judges a picture, uint8 [H, W, 3], by a caption of the world.

    Raises ValueError for a prompt that is none, and for another picture.
    """
    if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3:
        raise ValueError(
            f"the picture is {picture.dtype} {list(picture.shape)}, but it must be uint8 [H, W, 3]"
        )
    return _judge(read(prompt), look(picture), picture.shape[1], picture.shape[0])


def _judge(demanded: Description, seen: Seen, width: int, height: int) -> Verdict:
    things = seen.things
    parts: dict[str, list[float]] = {a: [] for a in ASPECTS}
    factor = 1.0

    if demanded.number is not None:
        number, place, digits = _number(demanded, things, width, height)
        things = [t for t in things if t not in digits]
        parts["number"].append(number)
        factor *= _floored("number", number)
        if demanded.number_place is not None and digits:
            parts["place"].append(place)
            factor *= _floored("place of the number", place)

    aspects, extra = _pair(demanded, things, width, height)
    for aspect in aspects:
        for name, value in aspect.items():
            parts[name].append(value)
    kept = EXTRA ** _weight(extra, min(width, height))
    parts["objects"].append(len(aspects) / len(demanded.objects) * kept)
    factor *= kept * sum(map(_product, aspects)) / len(demanded.objects)

    if demanded.background is not None:
        background = _colour(demanded.background, seen.background)
        background *= _ramp(seen.evenness, 0.7, 0.95)
        parts["background"].append(background)
        factor *= _floored("background", background)

    for name in ("colour", "shape", *_open(demanded)):
        parts[name] = parts[name] or [0.0]
    return Verdict(factor, {a: float(np.mean(v)) for a, v in parts.items() if v})


def _open(demanded: Description) -> list[str]:
    """Which of size and place the caption demands of any object."""
    names = [n for n in ("size", "place") if any(getattr(o, n) for o in demanded.objects)]
    return [*names, "place"] if demanded.relations and "place" not in names else names


def _pair(
    demanded: Description, things: list[Thing], width: int, height: int
) -> tuple[list[dict[str, float]], list[Thing]]:
    """The aspects of each demanded object that is there, in the pairing with the best scores.

    Also the things that belong to none.
    """
    short = min(width, height)
    candidates = things[:CANDIDATES]
    alone = []
    for o in demanded.objects:
        row = []
        for t in candidates:
            aspect = {"colour": _colour(o.colour, t.colour), "shape": _likeness(t, o.shape, SHAPES)}
            if o.size is not None:
                off = abs(np.log(t.diameter / short / SIZES[o.size]))
                aspect["size"] = _ramp(float(off), 0.24, 0.14)
            if o.place is not None:
                aspect["place"] = _place(o.place, t.x / width, t.y / height)
            row.append(aspect)
        alone.append(row)
    best: tuple[float, list[dict[str, float]], set[int]] = (-1.0, [], set())
    count = len(demanded.objects)
    nothing = [-1] * max(count - len(candidates), 0)
    for pairing in set(permutations([*range(len(candidates)), *nothing], count)):
        aspects = {i: dict(alone[i][j]) for i, j in enumerate(pairing) if j >= 0}
        for relation in demanded.relations:
            if relation.first in aspects and relation.second in aspects:
                a, b = candidates[pairing[relation.first]], candidates[pairing[relation.second]]
                held = _relation(relation, a, b, width, height)
                for i in (relation.first, relation.second):
                    aspects[i]["place"] = min(held, aspects[i].get("place", 1.0))
        total = sum(map(_product, aspects.values()))
        if total > best[0]:
            best = (total, list(aspects.values()), set(pairing))
    return best[1], [t for j, t in enumerate(things) if j not in best[2]]


def _number(
    demanded: Description, things: list[Thing], width: int, height: int
) -> tuple[float, float, list[Thing]]:
    """How right the best number in the picture is, how well it stands, and its digits."""
    number = demanded.number or ""
    best: tuple[float, float, list[Thing]] = (0.0, 0.0, [])
    digits = sorted((t for t in things if t.name in DIGITS), key=lambda t: t.x)
    for group in _side_by_side(digits):
        right = 0.0
        if len(group) == len(number):
            likeness = [_likeness(t, d, DIGITS) for t, d in zip(group, number, strict=True)]
            right = float(np.mean(likeness))
        place = 1.0
        if demanded.number_place is not None:
            x = (min(t.left for t in group) + max(t.right for t in group)) / 2 / width
            y = sum(t.y for t in group) / len(group) / height
            place = _place(demanded.number_place, x, y)
        if not best[2] or (right, place) > best[:2]:
            best = (right, place, group)
    return best


def _side_by_side(digits: list[Thing]) -> list[list[Thing]]:
    """The digits, from left to right, in groups that stand close together in a line."""
    groups: list[list[Thing]] = []
    for digit in digits:
        for group in groups:
            last = group[-1]
            near = digit.left - last.right < 0.6 * last.diameter
            if near and abs(digit.y - last.y) < 0.4 * last.diameter:
                group.append(digit)
                break
        else:
            groups.append([digit])
    return groups


def _ramp(value: float, low: float, high: float) -> float:
    """0 at `low`, 1 at `high`, straight in between; `high` may be the smaller one."""
    return float(np.clip((value - low) / (high - low), 0, 1))


def _floored(aspect: str, value: float) -> float:
    return FLOORS[aspect] + (1 - FLOORS[aspect]) * value


def _product(aspects: dict[str, float]) -> float:
    return float(np.prod([_floored(name, value) for name, value in aspects.items()]))


def _weight(things: list[Thing], short: int) -> float:
    """How many things these are; one smaller than the smallest shape counts in part."""
    return sum(min(1.0, t.area / (3 * SPECK * short**2)) for t in things)


def _colour(name: str, rgb: np.ndarray) -> float:
    """1 near the palette's colour, 0 far from it or nearer to another one."""
    away = np.sqrt(((RGB - rgb) ** 2).sum(-1))
    own = float(away[COLOURS.index(name)])
    others = float(np.delete(away, COLOURS.index(name)).min())
    return min(_ramp(own, 95, 55), _ramp(others - own, 0, 25))


def _likeness(thing: Thing, name: str, names: tuple[str, ...] | str) -> float:
    """1 where a thing's outline is plainly this one of `names`, 0 where another fits better.

    Right outlines overlap by 0.85 or more and lead by 0.08 or more, even blurred and small.
    """
    own = thing.likeness[name]
    lead = own - max(thing.likeness[n] for n in names if n != name)
    return min(_ramp(own, 0.6, 0.75), _ramp(lead, -0.02, 0.04))


def _place(name: str, x: float, y: float) -> float:
    """1 around a place, 0 from where on another one is plainly nearer."""
    off = max(abs(x - PLACES[name][0]), abs(y - PLACES[name][1]))
    return _ramp(off, 0.2, 0.11)


def _relation(relation: Relation, a: Thing, b: Thing, width: int, height: int) -> float:
    """1 where a's centre is plainly above (below, …) b's, 0 where it is not at all."""
    right, down = (a.x - b.x) / width, (a.y - b.y) / height
    way = {"above": -down, "below": down, "left of": -right, "right of": right}
    return _ramp(way[relation.relation], 0.0, 0.12)
