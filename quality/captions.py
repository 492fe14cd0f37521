"""Captions of scenes in English and Chinese, and what a caption demands of a picture.

`describe` picks one of many sentence forms; `read` understands all of them. What a caption
leaves out has a default in training (`scene.DEFAULT_*`), which `read` reports as None: open.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass

import numpy as np

from quality.scene import (
    COLOURS,
    DEFAULT_BACKGROUND,
    DEFAULT_NUMBER_PLACE,
    DEFAULT_PLACE,
    DEFAULT_SIZE,
    SHAPES,
    Object,
    Scene,
    place_of,
)

LANGUAGES = ("en", "zh")


@dataclass(frozen=True)
class Demand:
    """An object that a picture must show; None leaves size or place open."""

    colour: str
    shape: str
    size: str | None = None
    place: str | None = None


@dataclass(frozen=True)
class Relation:
    """The object number `first` of a description is `relation` (e.g. "above") number `second`."""

    first: int
    relation: str
    second: int


@dataclass(frozen=True)
class Description:
    """What a caption demands; None leaves background or place open, or demands no number."""

    objects: tuple[Demand, ...]
    relations: tuple[Relation, ...] = ()
    background: str | None = None
    number: str | None = None
    number_place: str | None = None


Words = dict[str, dict[str, tuple[str, ...]]]  # kind → name → forms

# The first word of each list is the most frequent one. English forms.
ENGLISH: Words = {
    "size": {
        "small": ("small", "little"),
        "medium": ("medium", "medium-sized"),
        "large": ("large", "big"),
    },
    "colour": {c: (c,) for c in COLOURS},
    "shape": {s: (s,) for s in SHAPES},
    "place": {
        "centre": ("in the centre", "in the center", "in the middle"),
        "left": ("on the left", "on the left side"),
        "right": ("on the right", "on the right side"),
        "top": ("at the top",),
        "bottom": ("at the bottom",),
        "top left": ("in the top left corner", "at the top left"),
        "top right": ("in the top right corner", "at the top right"),
        "bottom left": ("in the bottom left corner", "at the bottom left"),
        "bottom right": ("in the bottom right corner", "at the bottom right"),
    },
    "relation": {
        "above": ("above",),
        "below": ("below", "under"),
        "left of": ("to the left of", "left of"),
        "right of": ("to the right of", "right of"),
    },
    "it": {"it": ("it",)},
    "background": {"background": ("background",)},
    "number": {"number": ("number",)},
}
ENGLISH_LEADS = (
    "",
    "a picture of ",
    "an image of ",
    "a picture with ",
    "there is ",
    "draw ",
)
ENGLISH_FILLERS = (
    "a",
    "an",
    "the",
    "picture",
    "image",
    "of",
    "with",
    "there",
    "is",
    "draw",
    "and",
    "on",
    "in",
)

# Chinese forms. A relation always has its 的, which tells it from a place.
CHINESE: Words = {
    "size": {
        "small": ("小", "小的"),
        "medium": ("中等", "中等大小的"),
        "large": ("大", "大的"),
    },
    "colour": {
        "red": ("红色",),
        "orange": ("橙色",),
        "yellow": ("黄色",),
        "green": ("绿色",),
        "blue": ("蓝色",),
        "purple": ("紫色",),
        "pink": ("粉色", "粉红色"),
        "black": ("黑色",),
        "white": ("白色",),
    },
    "shape": {
        "circle": ("圆形", "圆"),
        "square": ("正方形", "方形"),
        "triangle": ("三角形",),
        "diamond": ("菱形",),
        "star": ("星形", "五角星"),
        "heart": ("心形", "爱心"),
        "cross": ("十字", "十字形"),
    },
    "place": {
        "centre": ("中间", "中央"),
        "left": ("左边", "左侧"),
        "right": ("右边", "右侧"),
        "top": ("顶部", "上方"),
        "bottom": ("底部", "下方"),
        "top left": ("左上角",),
        "top right": ("右上角",),
        "bottom left": ("左下角",),
        "bottom right": ("右下角",),
    },
    "relation": {
        "above": ("的上方", "的上面"),
        "below": ("的下方", "的下面"),
        "left of": ("的左边", "的左侧"),
        "right of": ("的右边", "的右侧"),
    },
    "it": {"it": ("它",)},
    "background": {"background": ("背景",)},
    "number": {"number": ("数字",)},
}
CHINESE_LEADS = ("", "画面中有", "图中有", "一张图片，", "画")
CHINESE_FILLERS = (
    "一张图片",
    "画面中",
    "画面的",
    "图中",
    "一个",
    "写着",
    "画",
    "有",
    "是",
    "在",
    "和",
    "的",
    "上",
)


def describe(scene: Scene, language: str, rng: np.random.Generator) -> str:
    """A caption of the scene, "en" or "zh", that demands nothing which the scene does not show.

    Raises ValueError for another language.
    """
    if language not in LANGUAGES:
        raise ValueError(f"language is {language!r}, but it must be one of {', '.join(LANGUAGES)}")
    return (_english if language == "en" else _chinese)(scene, rng)


def held_out(caption: str) -> bool:
    """Whether a caption is kept out of training, for measuring: every 32nd, by its checksum."""
    return zlib.crc32(caption.encode()) % 32 == 0


# --- what to say, in either language ---------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """A part of a caption: `thing` with its place, or by its relation to `other` or to "it"."""

    thing: Object | str  # a str is the number
    place: str | None = None
    relation: str | None = None
    other: Object | None = None
    it: bool = False


def _relation(a: Object, b: Object) -> str | None:
    """How a stands to b where they are plainly in one row or column, else None."""
    dx, dy = a.x - b.x, a.y - b.y
    if abs(dx) < 0.12 and abs(dy) > 0.24:
        return "above" if dy < 0 else "below"
    if abs(dy) < 0.12 and abs(dx) > 0.24:
        return "left of" if dx < 0 else "right of"
    return None


def _plan(scene: Scene, rng: np.random.Generator) -> list[_Part]:
    """What to say, in order. Each object is introduced once, by its place or a relation."""
    objects = [scene.objects[i] for i in rng.permutation(len(scene.objects))]
    parts = _related(objects, rng) if rng.random() < 0.5 else None
    if parts is None:
        parts = [_Part(o, place_of(o.x, o.y)) for o in objects]
        # Beside a number, "a star and the number 5 on the left" would leave the star in doubt.
        if len(objects) == 1 and scene.number is None and parts[0].place == DEFAULT_PLACE:
            parts = [_Part(objects[0], None if rng.random() < 0.6 else DEFAULT_PLACE)]
    if scene.number is not None:
        place = place_of(scene.number_x, scene.number_y)
        left_out = place == DEFAULT_NUMBER_PLACE and rng.random() < 0.4
        parts.append(_Part(scene.number, None if left_out else place))
    return parts


def _related(objects: list[Object], rng: np.random.Generator) -> list[_Part] | None:
    """The objects by relations, or None where that would leave too much open.

    Either all stand around the one in the centre ("it"), or two face each other across the
    picture and a third has its place.
    """
    places = [place_of(o.x, o.y) for o in objects]
    if len(objects) > 1 and "centre" in places:
        centre = objects[places.index("centre")]
        around = [o for o in objects if o is not centre]
        relations = [_relation(o, centre) for o in around]
        if None not in relations:
            return [
                _Part(centre, "centre"),
                *(_Part(o, relation=r, it=True) for o, r in zip(around, relations, strict=True)),
            ]
    for i, a in enumerate(objects):
        for j, b in enumerate(objects):
            if {places[i], places[j]} in ({"left", "right"}, {"top", "bottom"}):
                rest = [_Part(o, places[k]) for k, o in enumerate(objects) if k not in (i, j)]
                pair = _Part(a, relation=_relation(a, b), other=b, it=rng.random() < 0.3)
                # "it" is the caption's first object, so its pair then comes first.
                return [*rest, pair] if rng.random() < 0.3 and not pair.it else [pair, *rest]
    return None


def _word(words: Words, kind: str, name: str, rng: np.random.Generator) -> str:
    """One of the forms of a word, the first one half of the time."""
    forms = words[kind][name]
    return forms[0] if rng.random() < 0.5 else forms[rng.integers(len(forms))]


def _background(scene: Scene, rng: np.random.Generator) -> str | None:
    """The background to name, or None where it is left out."""
    left_out = scene.background == DEFAULT_BACKGROUND and rng.random() < 0.4
    return None if left_out else scene.background


# --- English -----------------------------------------------------------------------------------


def _english(scene: Scene, rng: np.random.Generator) -> str:
    def word(kind: str, name: str) -> str:
        return _word(ENGLISH, kind, name, rng)

    def thing(o: Object | str, article: str = "") -> str:
        if isinstance(o, str):
            return f"the number {o}"
        words = [word("colour", o.colour), word("shape", o.shape)]
        if o.size != DEFAULT_SIZE or rng.random() < 0.3:
            words.insert(0, word("size", o.size))
        article = article or ("an" if words[0][0] in "aeiou" else "a")
        return " ".join([article, *words])

    def clause(part: _Part, alone: bool) -> str:
        if part.relation is not None:
            relation = word("relation", part.relation)
            if part.other is None:
                return f"{thing(part.thing)} {relation} it"
            if part.it:
                return f"{thing(part.other)} with {thing(part.thing)} {relation} it"
            if alone and rng.random() < 0.3:
                return f"{relation} {thing(part.other)} there is {thing(part.thing)}"
            return f"{thing(part.thing)} {relation} {thing(part.other)}"
        if part.place is None:
            return thing(part.thing)
        if places_first:
            return f"{word('place', part.place)} {there_is}{thing(part.thing)}"
        return f"{thing(part.thing)} {word('place', part.place)}"

    parts = _plan(scene, rng)
    places_first = all(p.place is not None for p in parts) and rng.random() < 0.25
    there_is = "there is " if rng.random() < 0.5 else ""
    clauses = [clause(p, i == 0 and len(parts) == 1) for i, p in enumerate(parts)]
    text = clauses[-1]
    if len(clauses) > 1:
        text = ", ".join(clauses[:-1]) + (" and " if rng.random() < 0.8 else ", ") + text
    if not places_first and text.startswith(("a ", "an ", "the ")):
        text = ENGLISH_LEADS[rng.integers(len(ENGLISH_LEADS))] * (rng.random() < 0.7) + text
    background = _background(scene, rng)
    if background is not None:
        name = word("colour", background)
        article = "an" if name[0] in "aeiou" else "a"
        forms = (
            f"{text}, {name} background",
            f"{text} on {article} {name} background",
            f"{text}, the background is {name}",
            f"{name} background, {text}",
            f"on {article} {name} background, {text}",
        )
        text = forms[rng.integers(len(forms))]
    if rng.random() < 0.25:
        text = text[0].upper() + text[1:] + "."
    return text


# --- Chinese -----------------------------------------------------------------------------------


def _chinese(scene: Scene, rng: np.random.Generator) -> str:
    def word(kind: str, name: str) -> str:
        return _word(CHINESE, kind, name, rng)

    def thing(o: Object | str) -> str:
        if isinstance(o, str):
            return f"数字{o}"
        colour, shape = word("colour", o.colour), word("shape", o.shape)
        if o.size == DEFAULT_SIZE and rng.random() < 0.7:
            return f"一个{colour}{'的' if rng.random() < 0.5 else ''}{shape}"
        plain, adjective = CHINESE["size"][o.size]
        adjective = adjective if adjective.endswith("的") else f"{adjective}的"
        if rng.random() < 0.5:
            return f"一个{adjective}{colour}{shape}"
        return f"一个{colour}的{plain}{shape}"

    def clause(part: _Part) -> str:
        if part.relation is not None:
            relation = word("relation", part.relation)
            if part.other is None:
                return f"它{relation}有{thing(part.thing)}"
            if part.it:
                return f"{thing(part.other)}，它{relation}有{thing(part.thing)}"
            if rng.random() < 0.4:
                return f"{thing(part.other)}{relation}有{thing(part.thing)}"
            return f"{thing(part.thing)}在{thing(part.other)}{relation}"
        if part.place is None:
            return thing(part.thing)
        if places_first:
            verb = "写着" if isinstance(part.thing, str) and rng.random() < 0.5 else "有"
            return f"{word('place', part.place)}{verb}{thing(part.thing)}"
        return f"{thing(part.thing)}在{word('place', part.place)}"

    parts = _plan(scene, rng)
    places_first = all(p.place is not None for p in parts) and rng.random() < 0.4
    clauses = [clause(p) for p in parts]
    text = "，".join(clauses)
    if len(clauses) > 1 and not places_first and rng.random() < 0.2:
        text = "，".join(clauses[:-1]) + "和" + clauses[-1]
    if not places_first and text.startswith("一个") and parts[0].relation is None:
        text = CHINESE_LEADS[rng.integers(len(CHINESE_LEADS))] * (rng.random() < 0.6) + text
    background = _background(scene, rng)
    if background is not None:
        name = word("colour", background)
        forms = (
            f"{text}，{name}背景",
            f"{text}，背景是{name}",
            f"{text}，{name}的背景",
            f"{name}背景，{text}",
            f"在{name}背景上，{text}",
        )
        text = forms[rng.integers(len(forms))]
    return text + "。" * (rng.random() < 0.25)


# --- back from words ---------------------------------------------------------------------------

# A caption becomes a string with one letter a word, for instance "a small red circle on the
# left" SCHP, which is cut into clauses. O stands for an object.
LETTERS = {
    "size": "S",
    "colour": "C",
    "shape": "H",
    "place": "P",
    "relation": "R",
    "it": "I",
    "background": "B",
    "number": "N",
    "digits": "D",
}
OBJECT = "S?CS?H"
BACKGROUND = re.compile("CB|BC")

# In each relation's clause, which object stands to which: 0 and 1 are the clause's own objects
# in order, "it" the caption's first one. Chinese puts the relation behind its reference.
Related = dict[str, tuple[int, int | str]]
ENGLISH_RELATED: Related = {"ORO": (0, 1), "ROO": (1, 0), "ORI": (0, "it"), "RIO": (0, "it")}
CHINESE_RELATED: Related = {"OOR": (0, 1), "ORO": (1, 0), "IRO": (0, "it")}
PLACES_FIRST = ("PO", "PN?D", "O", "N?D")
PLACES_LAST = ("OP", "O", "N?DP", "N?D")


@dataclass(frozen=True)
class _Token:
    letter: str
    name: str


def read(caption: str) -> Description:
    """What a caption demands, for every caption that `describe` can write and some others.

    Raises ValueError, with one sentence, for a caption that is not of this world.
    """
    chinese = re.search("[\u4e00-\u9fff]", caption) is not None
    tokens = _tokens(caption, chinese)
    letters = "".join(t.letter for t in tokens)
    background = None
    if found := BACKGROUND.search(letters):
        background = next(t.name for t in tokens[slice(*found.span())] if t.letter == "C")
        del tokens[slice(*found.span())]
        letters = letters[: found.start()] + letters[found.end() :]
    related = CHINESE_RELATED if chinese else ENGLISH_RELATED
    clauses = (*related, *(PLACES_FIRST if letters.startswith("P") else PLACES_LAST))
    objects: list[Demand] = []
    relations: list[Relation] = []
    number = number_place = None
    at = 0
    while at < len(letters):
        for clause in clauses:
            if found := re.compile(clause.replace("O", OBJECT)).match(letters, at):
                break
        else:
            raise ValueError(_unclear(caption, tokens[at].name))
        words = tokens[slice(*found.span())]
        at = found.end()
        place = next((t.name for t in words if t.letter == "P"), None)
        if "D" in clause:
            if number is not None:
                raise ValueError(f"“{caption}” asks for two numbers, but one is the most")
            number, number_place = next(t.name for t in words if t.letter == "D"), place
            continue
        first = len(objects)
        objects += _objects(words, place)
        if clause in related:
            one, other = related[clause]
            if other == "it" and first == 0:
                raise ValueError(_unclear(caption, "it"))
            relation = next(t.name for t in words if t.letter == "R")
            second = 0 if isinstance(other, str) else first + other
            relations.append(Relation(first + one, relation, second))
    if not 1 <= len(objects) <= 3:
        raise ValueError(f"“{caption}” asks for {len(objects)} objects, but 1 to 3 are possible")
    return Description(tuple(objects), tuple(relations), background, number, number_place)


def _unclear(caption: str, name: str) -> str:
    return f"“{caption}” is not a sentence of the synthetic world: “{name}” fits nothing before it"


def _objects(words: list[_Token], place: str | None) -> list[Demand]:
    objects = []
    named: dict[str, str] = {}
    for word in words:
        named[word.letter] = word.name
        if word.letter == "H":
            objects.append(Demand(named["C"], named["H"], named.get("S"), place))
            named = {}
    return objects


def _lexicon(words: Words, fillers: tuple[str, ...]) -> dict[str, _Token | None]:
    lexicon: dict[str, _Token | None] = dict.fromkeys(fillers)
    for kind, names in words.items():
        for name, forms in names.items():
            lexicon.update(dict.fromkeys(forms, _Token(LETTERS[kind], name)))
    return lexicon


ENGLISH_LEXICON = _lexicon(ENGLISH, ENGLISH_FILLERS)
CHINESE_LEXICON = _lexicon(CHINESE, CHINESE_FILLERS)


def _tokens(caption: str, chinese: bool) -> list[_Token]:
    """The caption's words, the longest that fits first, without punctuation and fillers."""
    lexicon, glue = (CHINESE_LEXICON, "") if chinese else (ENGLISH_LEXICON, " ")
    pieces = re.findall(r"\d+|[^\W\d]" if chinese else r"\d+|[\w-]+", caption.lower())
    longest = max(len(form.split()) if glue else len(form) for form in lexicon)
    tokens: list[_Token] = []
    at = 0
    while at < len(pieces):
        if pieces[at].isdecimal():
            if len(pieces[at]) > 2:
                raise ValueError(f"{pieces[at]} has more than two digits")
            tokens.append(_Token("D", pieces[at]))
            at += 1
            continue
        for count in range(longest, 0, -1):
            form = glue.join(pieces[at : at + count])
            if form in lexicon:
                break
        else:
            raise ValueError(f"“{pieces[at]}” in “{caption}” is not a word of the synthetic world")
        if (token := lexicon[form]) is not None:
            tokens.append(token)
        at += len(pieces[at : at + count])
    return tokens
