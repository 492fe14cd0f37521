"""What each kind of layer costs in each format, and what the recipes' exceptions buy.

    python -m bench.ablation

Single predictions of checkpoints/tiny by engines exported with variants of the recipes: the lowest
cosine to FP32 over the gate's prompts.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

from bench.common import write_result
from bench.trained import GATE, Trained
from build.tiny import CALIBRATION
from export import quantize
from export.calibration import Calibration, load_calibration
from export.recipe import EngineRecipe, block_of, load_recipe

WEIGHTS = "int8_weights"
OUT, VALUE = "attn.to_out.0", "attn.to_v"
DOWN, TEXT_MLP = "img_mlp.net.2", ("txt_mlp.net.0.proj", "txt_mlp.net.2")
QUERY_KEY = ("self_attn.q_proj", "self_attn.k_proj")
TEXT_DOWN = "mlp.down_proj"


class Exceptions(NamedTuple):
    """So many blocks at either end and these kinds of layers get another format."""

    edge_blocks: int
    kinds: tuple[str, ...] = ()
    format: str = WEIGHTS


NONE, EDGE, EDGES = Exceptions(0), Exceptions(1), Exceptions(2)
TRIED = {
    ("dit", "fp8"): [
        *(NONE, EDGE, EDGES, Exceptions(0, (DOWN,)), Exceptions(1, (DOWN,))),
        *(Exceptions(1, (DOWN, OUT)), Exceptions(1, (DOWN, OUT, VALUE)), Exceptions(2, (DOWN,))),
        Exceptions(2, (DOWN,), "keep"),
    ],
    ("dit", "int8"): [
        *(NONE, EDGE, EDGES, Exceptions(0, (DOWN,)), Exceptions(1, (DOWN,))),
        *(Exceptions(2, (DOWN,)), Exceptions(2, (), "keep")),
    ],
    ("dit", "nvfp4"): [
        *(NONE, EDGE, EDGES, Exceptions(2, (), "fp8"), Exceptions(2, (), "keep")),
        *(Exceptions(2, (DOWN,)), Exceptions(2, (OUT,)), Exceptions(2, TEXT_MLP)),
        Exceptions(1, (DOWN, OUT, VALUE), "fp8"),
    ],
    ("text_encoder", "fp8"): [
        *(NONE, EDGES, Exceptions(0, QUERY_KEY), Exceptions(2, QUERY_KEY)),
        Exceptions(2, QUERY_KEY, "keep"),
    ],
    ("text_encoder", "int8"): [
        *(NONE, EDGES, Exceptions(0, (TEXT_DOWN,)), Exceptions(2, (TEXT_DOWN,))),
        Exceptions(2, (TEXT_DOWN,), "keep"),
    ],
}
SMOOTHING = (None, 0.5, 0.65, 0.8, 0.9)


class Bench:
    """Measures variants of one engine in one format."""

    def __init__(self, trained: Trained, calibration: Calibration, engine: str, name: str) -> None:
        self.trained, self.calibration, self.engine, self.name = trained, calibration, engine, name
        self.shipped = load_recipe(name)[engine]
        every = trained.layers(engine)
        self.layers = [layer for layer in every if block_of(layer) is not None]
        self.outside = [layer for layer in every if block_of(layer) is None]

    def recipe(self, quantized: list[str], others: list[str], format: str) -> EngineRecipe:
        """Layers in the format, and others in another one, without further exceptions."""
        formats = {self.name: quantized, "keep": [*self.outside]}
        formats.setdefault(format, []).extend(others)
        return replace(self.shipped, formats={k: v for k, v in formats.items() if v}, edge_blocks=0)

    def cosines(self, recipe: EngineRecipe) -> list[float]:
        found = self.trained.cosines(self.engine, recipe, self.calibration)
        print(self.engine, self.name, *(f"{value:.5f}" for value in found), flush=True)
        return found

    def alone(self) -> dict[str, list[float]]:
        """One kind of layer, or one block, in the format, everything else in FP32."""
        groups: dict[str, list[str]] = {}
        for layer in self.layers:
            groups.setdefault(kind_of(layer), []).append(layer)
            groups.setdefault(f"block {block_of(layer)}", []).append(layer)
        return {
            group: self.cosines(
                self.recipe(chosen, [x for x in self.layers if x not in chosen], "keep")
            )
            for group, chosen in groups.items()
        }

    def exceptions(self) -> Iterator[dict[str, Any]]:
        blocks = self.trained.engines[self.engine].blocks
        every = [*self.layers, *self.outside]
        for tried in TRIED[self.engine, self.name]:
            edge = min(tried.edge_blocks, blocks // 3)
            spared = [
                layer
                for layer in self.layers
                if kind_of(layer) in tried.kinds
                or not edge <= (block_of(layer) or 0) < blocks - edge
            ]
            rest = [layer for layer in self.layers if layer not in spared]
            recipe = self.recipe(rest, spared, tried.format)
            shipped = recipe.assign(every, blocks) == self.shipped.assign(every, blocks)
            yield {
                **tried._asdict(),
                "share": len(rest) / len(self.layers),
                "shipped": shipped,
                "cosines": self.cosines(recipe),
            }

    def arithmetic(self) -> dict[str, list[float]]:
        """Every layer of the blocks, with other ways to choose scales."""
        recipe = self.recipe(self.layers, [], self.name)
        if self.name == "int8":
            return {
                f"smooth {alpha}": self.cosines(replace(recipe, smooth=alpha))
                for alpha in SMOOTHING
            }
        if self.name != "nvfp4":
            return {}
        found = {}
        measured = self.calibration
        even = {
            name: np.ones_like(value) if name.endswith("/squares") else value
            for name, value in measured.tensors.items()
        }
        for what, peaks, tensors in (
            ("every block's peak becomes 6", (6.0,), even),
            ("the better of 6 and 4", (6.0, 4.0), even),
            ("the best of eight", quantize.BLOCK_PEAKS, even),
            ("the best of eight, inputs weighed", quantize.BLOCK_PEAKS, measured.tensors),
        ):
            self.calibration = replace(measured, tensors=tensors)
            with patch.object(quantize, "BLOCK_PEAKS", peaks):
                found[what] = self.cosines(recipe)
        self.calibration = measured
        return found


def kind_of(layer: str) -> str:
    """`transformer_blocks.3.attn.to_q` → `attn.to_q`."""
    return layer.split(".", 2)[2]


def main() -> None:
    argparse.ArgumentParser(prog="python -m bench.ablation", description=__doc__).parse_args()
    values: dict[str, Any] = {"noise_levels": GATE.noise_levels}
    with tempfile.TemporaryDirectory() as name:
        trained = Trained(Path(name))
        ranges = load_calibration(CALIBRATION, trained.fingerprint)
        for engine, recipe in TRIED:
            bench = Bench(trained, ranges, engine, recipe)
            values.setdefault(engine, {})[recipe] = {
                "alone": bench.alone(),
                "exceptions": list(bench.exceptions()),
                "arithmetic": bench.arithmetic(),
            }
    print(write_result("ablation", values))


if __name__ == "__main__":
    main()
