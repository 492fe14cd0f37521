import json
from pathlib import Path

import pytest

PROMPTS = (
    "a red circle on the left and a blue square on the right, white background",
    "a yellow star, black background",
    "一个绿色的三角形，白色背景",
)


@pytest.fixture(scope="session")
def gate(tmp_path_factory) -> Path:
    """Three prompts of different lengths for the small checkpoint, without any threshold."""
    folder = tmp_path_factory.mktemp("gate")
    lines = [json.dumps({"prompt": prompt, "seed": i}) for i, prompt in enumerate(PROMPTS)]
    (folder / "prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (folder / "gate.yaml").write_text(
        'fields: {negative_prompt: " ", num_inference_steps: 4, height: 64, width: 64}\n'
        "noise_levels: [0.9, 0.3]\n"
        "noise_prompts: 2\n"
    )
    return folder
