from __future__ import annotations

import numpy as np
import pytest

from quality.scene import DEFAULT_BACKGROUND, DEFAULT_SIZE, place_of
from quality.world import (
    LANGUAGES,
    Demand,
    Description,
    Object,
    Relation,
    Scene,
    describe,
    held_out,
    random_scene,
    read,
)


def shown(description: Description, scene: Scene) -> list[str]:
    """What the description demands and the scene lacks, or leaves open without a default."""
    wrong = []
    looks = {(o.colour, o.shape): o for o in scene.objects}
    found = [looks.get((d.colour, d.shape)) for d in description.objects]
    if None in found or len(set(map(id, found))) != len(scene.objects):
        return ["objects"]
    objects = [o for o in found if o is not None]
    for demand, o in zip(description.objects, objects, strict=True):
        if (demand.size or DEFAULT_SIZE) != o.size:
            wrong.append(f"size of {o}")
        if demand.place is not None and demand.place != place_of(o.x, o.y):
            wrong.append(f"place of {o}")
    for r in description.relations:
        a, b = objects[r.first], objects[r.second]
        away = {"above": b.y - a.y, "below": a.y - b.y, "left of": b.x - a.x, "right of": a.x - b.x}
        if away[r.relation] < 0.2:
            wrong.append(f"{r}")
    if (description.background or DEFAULT_BACKGROUND) != scene.background:
        wrong.append("background")
    if description.number != scene.number:
        wrong.append("number")
    if description.number_place not in (None, place_of(scene.number_x, scene.number_y)):
        wrong.append("place of the number")
    return wrong


@pytest.mark.parametrize("language", LANGUAGES)
def test_reads_what_describe_writes(language: str) -> None:
    rng = np.random.default_rng(3)
    forms = set()
    for _ in range(5000):
        scene = random_scene(rng)
        caption = describe(scene, language, rng)
        assert shown(read(caption), scene) == [], f"{caption}\n{scene}\n{read(caption)}"
        forms.add(caption)
    assert len(forms) > 4900


@pytest.mark.parametrize("language", LANGUAGES)
def test_many_sentences_for_one_scene(language: str) -> None:
    rng = np.random.default_rng(4)
    objects = (
        Object("circle", "red", "medium", 0.2, 0.5),
        Object("star", "blue", "small", 0.8, 0.5),
    )
    scene = Scene(128, 128, "white", objects)
    assert len({describe(scene, language, rng) for _ in range(400)}) > 200


RED, BLUE = Demand("red", "circle"), Demand("blue", "square")


@pytest.mark.parametrize(
    ("caption", "demanded"),
    [
        ("a red circle", Description((RED,))),
        (
            "a red circle on the left and a blue square on the right, white background",
            Description(
                (Demand("red", "circle", None, "left"), Demand("blue", "square", None, "right")),
                background="white",
            ),
        ),
        ("a red circle above a blue square", Description((RED, BLUE), (Relation(0, "above", 1),))),
        (
            "above a blue square there is a red circle",
            Description((BLUE, RED), (Relation(1, "above", 0),)),
        ),
        (
            "A blue square with a red circle to the left of it.",
            Description((BLUE, RED), (Relation(1, "left of", 0),)),
        ),
        ("一个红色圆形在一个蓝色方形的上方", Description((RED, BLUE), (Relation(0, "above", 1),))),
        ("一个蓝色方形的上方有一个红色圆形", Description((BLUE, RED), (Relation(1, "above", 0),))),
        (
            "一个蓝色的正方形，它的左边有一个大的红色圆，黑色背景。",
            Description(
                (BLUE, Demand("red", "circle", "large")), (Relation(1, "left of", 0),), "black"
            ),
        ),
        (
            "on a pink background, at the top the number 42, in the middle a big red circle",
            Description((Demand("red", "circle", "large", "centre"),), (), "pink", "42", "top"),
        ),
        (
            "左上角写着数字7，右边有一个小的蓝色方形",
            Description((Demand("blue", "square", "small", "right"),), (), None, "7", "top left"),
        ),
    ],
)
def test_reads(caption: str, demanded: Description) -> None:
    assert read(caption) == demanded


@pytest.mark.parametrize(
    "caption",
    [
        *("", " ", "a dog", "一只狗", "red", "the number 42", "a circle", "it above a red circle"),
        "a red circle and the number 123",
        "a red circle, white background, black background",
        "a red circle, a blue circle, a green circle and a black circle",
        "a red circle on the left on the right",
    ],
)
def test_refuses_other_captions(caption: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        read(caption)


def test_refuses_other_languages() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="en, zh"):
        describe(random_scene(rng), "fr", rng)


def test_one_caption_in_32_is_held_out() -> None:
    rng = np.random.default_rng(5)
    captions = [describe(random_scene(rng), "en", rng) for _ in range(3000)]
    assert 50 < sum(map(held_out, captions)) < 150
    assert held_out(captions[0]) == held_out(captions[0])
