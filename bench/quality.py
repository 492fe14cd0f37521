"""How good the trained checkpoint's pictures are: other steps, no guidance, other negative prompts.

    python -m bench.quality

Through a server of the profile `cpu`, with the prompts of quality/gates/tiny.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.common import ROOT, write_result
from build.progress import ProgressBar
from build.tiny import export_tiny
from quality.gate import Gate, load_gate
from quality.run import describe_comparison, load_run, measure
from quality.served import Served
from quality.vision import look
from serving.server import TritonServer

SETTINGS: dict[str, dict[str, Any]] = {
    "20 steps": {},
    "20 steps, no guidance": {"true_cfg_scale": 1.0},
    "4 steps": {"num_inference_steps": 4},
    "8 steps": {"num_inference_steps": 8},
    "50 steps": {"num_inference_steps": 50},
    "20 steps, empty negative prompt": {"negative_prompt": ""},
    "20 steps, another caption as the negative prompt": {
        "negative_prompt": "a small green diamond at the top and the number 7, purple background"
    },
}
KEPT = ("score", "score_low", "score_high", "score_en", "score_zh", "score_shuffled")


def scores(gate: Gate, served: Served, folder: Path) -> dict[str, Any]:
    """By setting: the scores with their intervals, and the comparison with the reference."""
    reference = load_run(gate.reference) if gate.reference else None
    found = {}
    for name, fields in SETTINGS.items():
        bar = ProgressBar()
        changed = replace(gate.with_fields(**fields), noise_levels=())
        result = measure(changed, served, folder / "run", reference, bar)
        bar.close()
        found[name] = {"fields": result["fields"], **{key: result[key] for key in KEPT}}
        found[name] |= {key: result[key] for key in ("groups", "parts", "distances", "comparison")}
        print(f"{name}: {describe_comparison(result['comparison'])}", flush=True)
    return found


def of_the_empty_prompt(gate: Gate, served: Served) -> dict[str, Any]:
    """Whether pictures for "" are of the world: an even background and one to four things."""
    prompts = [replace(p, fields={**p.fields, "prompt": ""}) for p in gate.prompts]
    seen = [look(picture.pixels) for picture in served.draw(prompts)]
    good = [s.evenness > 0.95 and 1 <= len(s.things) <= 4 for s in seen]
    return {"pictures": len(seen), "share_of_the_world": sum(good) / len(good)}


def main() -> None:
    argparse.ArgumentParser(prog="python -m bench.quality", description=__doc__).parse_args()
    gate = load_gate(ROOT / "quality" / "gates" / "tiny")
    with (
        tempfile.TemporaryDirectory() as folder,
        TritonServer(export_tiny()) as server,
        Served(server.grpc_url) as served,
    ):
        values = {
            "scores": scores(gate, served, Path(folder)),
            "empty_prompt": of_the_empty_prompt(gate, served),
        }
    print(f"empty prompt: {values['empty_prompt']['share_of_the_world']:.0%} show the world")
    print(write_result("quality", values))


if __name__ == "__main__":
    main()
