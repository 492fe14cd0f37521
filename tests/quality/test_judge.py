from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image, ImageFilter

from quality.judge import judge
from quality.scene import PALETTE
from quality.world import Object, Scene, describe, random_scene, render

SCENE = Scene(
    144,
    112,
    "yellow",
    (
        Object("circle", "red", "large", 0.25, 0.5),
        Object("star", "blue", "small", 0.8, 0.2),
    ),
    "42",
    0.75,
    0.8,
)
PROMPT = (
    "a large red circle on the left, a small blue star in the top right corner "
    "and the number 42 in the bottom right corner, yellow background"
)


def pairs(count: int, seed: int) -> list[tuple[Scene, str]]:
    rng = np.random.default_rng(seed)
    scenes = [random_scene(rng) for _ in range(count)]
    return [(s, describe(s, "en" if i % 2 else "zh", rng)) for i, s in enumerate(scenes)]


def blurred(picture: np.ndarray, radius: float, sigma: float, seed: int) -> np.ndarray:
    soft = np.asarray(Image.fromarray(picture).filter(ImageFilter.GaussianBlur(radius)))
    noise = np.random.default_rng(seed).normal(0, sigma, picture.shape)
    return (soft + noise).round().clip(0, 255).astype(np.uint8)


def test_rendered_pictures_are_right() -> None:
    verdicts = [judge(prompt, render(scene)) for scene, prompt in pairs(300, 1)]
    assert np.mean([v.score for v in verdicts]) >= 0.99
    assert min(v.score for v in verdicts) >= 0.9
    assert min(min(v.parts.values()) for v in verdicts) >= 0.9


def test_noise_and_blur_are_forgiven() -> None:
    scores = [
        judge(p, blurred(render(s), 0.8, 6, i)).score for i, (s, p) in enumerate(pairs(150, 2))
    ]
    assert np.mean(scores) >= 0.95


def test_pictures_for_another_prompt_are_wrong() -> None:
    cases = pairs(300, 3)
    scores = [
        judge(prompt, render(scene)).score for (scene, _), (_, prompt) in itertools.pairwise(cases)
    ]
    assert np.mean(scores) <= 0.3


def test_noise_scores_nothing() -> None:
    rng = np.random.default_rng(4)
    scores = []
    for scene, prompt in pairs(20, 4):
        shape = (scene.height, scene.width, 3)
        scores.append(judge(prompt, rng.integers(0, 256, shape, np.uint8)).score)
        coarse = Image.fromarray(rng.integers(0, 256, (16, 16, 3), np.uint8))
        scores.append(judge(prompt, np.asarray(coarse.resize(shape[1::-1]))).score)
    assert np.mean(scores) < 0.01
    assert max(scores) < 0.05


def test_blank_pictures_score_nothing() -> None:
    for scene, prompt in pairs(50, 5):
        picture = np.empty((scene.height, scene.width, 3), np.uint8)
        picture[:] = PALETTE[scene.background]
        assert judge(prompt, picture).score == 0


def test_one_wrong_aspect_lowers_its_part_alone() -> None:
    circle, star = SCENE.objects
    right = judge(PROMPT, render(SCENE))
    assert right.score >= 0.99
    assert set(right.parts) == {
        *("objects", "colour", "shape", "size", "place", "background", "number")
    }
    wrong = {
        "colour": replace(SCENE, objects=(replace(circle, colour="green"), star)),
        "shape": replace(SCENE, objects=(circle, replace(star, shape="heart"))),
        "size": replace(SCENE, objects=(replace(circle, size="medium"), star)),
        "place": replace(SCENE, objects=(circle, replace(star, x=0.5))),
        "background": replace(SCENE, background="pink"),
        "number": replace(SCENE, number="47"),
        "objects": replace(SCENE, objects=(circle,)),
    }
    for aspect, scene in wrong.items():
        verdict = judge(PROMPT, render(scene))
        assert verdict.score < 0.85, aspect
        for name, part in verdict.parts.items():
            if name == aspect:
                assert part < 0.75, aspect
            else:
                assert part >= 0.95, f"{name} for a wrong {aspect}"


def test_every_random_wrong_aspect_lowers_the_score() -> None:
    rng = np.random.default_rng(6)
    for scene, _ in pairs(60, 6):
        prompt = "a {0.size} {0.colour} {0.shape}".format(scene.objects[0])
        alone = replace(scene, objects=scene.objects[:1], number=None)
        assert judge(prompt, render(alone)).score > 0.95
        for aspect, values in {
            "colour": [c for c in PALETTE if c != scene.background],
            "shape": ["circle", "square", "triangle", "diamond", "star", "heart", "cross"],
            "size": ["small", "medium", "large"],
        }.items():
            old = getattr(alone.objects[0], aspect)
            new = rng.choice([v for v in values if v != old])
            changed = replace(alone.objects[0], x=0.5, y=0.5, **{aspect: str(new)})
            verdict = judge(prompt, render(replace(alone, objects=(changed,))))
            assert verdict.score < 0.65, (prompt, changed)
            assert verdict.parts[aspect] < 0.1, (prompt, changed)
            assert min(v for n, v in verdict.parts.items() if n != aspect) > 0.9


def test_extra_things_cost() -> None:
    more = replace(SCENE, objects=(*SCENE.objects, Object("cross", "black", "small", 0.5, 0.2)))
    verdict = judge(PROMPT, render(more))
    assert 0.5 < verdict.score < 0.7
    assert verdict.parts["objects"] < 0.7
    assert judge("a large red circle", render(SCENE)).score < 0.4


def test_relations() -> None:
    scene = Scene(
        128,
        128,
        "white",
        (Object("circle", "red", "medium", 0.5, 0.2), Object("star", "blue", "medium", 0.5, 0.8)),
    )
    picture = render(scene)
    assert judge("a red circle above a blue star", picture).score > 0.99
    assert judge("一个蓝色星形在一个红色圆形的下方", picture).score > 0.99
    wrong = judge("a red circle below a blue star", picture)
    assert wrong.parts["place"] == 0
    assert wrong.parts["colour"] > 0.99
    assert wrong.score < 0.5


def test_what_the_caption_leaves_open_is_not_judged() -> None:
    for background, size, x in (("white", "small", 0.2), ("green", "large", 0.7)):
        scene = Scene(112, 144, background, (Object("heart", "red", size, x, 0.6),))
        verdict = judge("a red heart", render(scene))
        assert verdict.score > 0.99
        assert set(verdict.parts) == {"objects", "colour", "shape"}


def test_touching_things_are_told_apart() -> None:
    scene = Scene(
        128,
        128,
        "white",
        (
            Object("square", "red", "large", 0.3, 0.5),
            Object("square", "blue", "large", 0.3 + 0.92 * 0.37, 0.5),
        ),
    )
    prompt = "a red square to the left of a blue square, white background"
    assert judge(prompt, render(scene)).score > 0.95


def test_refuses_other_pictures() -> None:
    with pytest.raises(ValueError, match="uint8"):
        judge("a red circle", np.zeros((128, 128, 3), np.float32))
