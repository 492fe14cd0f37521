"""Makes the prompts of the gate of checkpoints/tiny: captions that training never saw.

python -m quality.prompts > quality/gates/tiny/prompts.jsonl
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from quality.captions import LANGUAGES, describe, held_out
from quality.scene import PICTURE_SIZES, random_scene

COUNT = 200
SEED = 2026


def world_prompts(count: int = COUNT, seed: int = SEED) -> list[dict[str, Any]]:
    """Held-out captions, all different; languages in turn, picture sizes in turn."""
    rng = np.random.default_rng(seed)
    prompts: dict[str, dict[str, Any]] = {}
    while len(prompts) < count:
        i = len(prompts)
        width, height = PICTURE_SIZES[i // len(LANGUAGES) % len(PICTURE_SIZES)]
        language = LANGUAGES[i % len(LANGUAGES)]
        caption = describe(random_scene(rng, (width, height)), language, rng)
        if held_out(caption) and caption not in prompts:
            prompts[caption] = {
                "prompt": caption,
                "language": language,
                "height": height,
                "width": width,
                "seed": 1000 + i,
            }
    return list(prompts.values())


if __name__ == "__main__":
    for prompt in world_prompts():
        print(json.dumps(prompt, ensure_ascii=False))
