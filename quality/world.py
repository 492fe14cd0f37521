"""The synthetic world: a scene, its picture, its captions, and what a caption demands.

rng = np.random.default_rng(0)
scene = random_scene(rng)
picture = render(scene)                  # uint8 [H, W, 3]
caption = describe(scene, "en", rng)     # "a red circle on the left, white background"
demanded = read(caption)                 # what a picture of that caption must show
"""

from quality.captions import LANGUAGES, Demand, Description, Relation, describe, held_out, read
from quality.render import render
from quality.scene import (
    COLOURS,
    PALETTE,
    PICTURE_SIZES,
    PLACES,
    RELATIONS,
    SHAPES,
    SIZES,
    Object,
    Scene,
    random_scene,
)

__all__ = [
    "COLOURS",
    "LANGUAGES",
    "PALETTE",
    "PICTURE_SIZES",
    "PLACES",
    "RELATIONS",
    "SHAPES",
    "SIZES",
    "Demand",
    "Description",
    "Object",
    "Relation",
    "Scene",
    "describe",
    "held_out",
    "random_scene",
    "read",
    "render",
]
