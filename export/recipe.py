"""Recipes: which layers of the engines become which number format.

A recipe is a file in `export/recipes/`. For each engine that it changes:

    dit:
      compute: bf16              # what is not quantized, and the engine's borders: fp32 or bf16
      formats:
        fp8: ["transformer_blocks.*.attn.*"]        # patterns of layers' names
        keep: [img_in, txt_in, proj_out]            # layers that stay in `compute`
      smooth: 0.8                # only for int8: SmoothQuant's alpha
      edge_blocks: 2             # so many blocks at either end, at most a third of all, get
      edge_format: int8_weights  # another format; by default they stay in `compute`
      attention: fp8             # only of dit: its attention in FP8 as well

A layer is a matrix multiplication or convolution with a weight; its name is the weight's in the
checkpoint, without ".weight". Every layer must match exactly one pattern.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from export.graph import ExportError

RECIPES = Path(__file__).parent / "recipes"
ENGINES = ("text_encoder", "modulation", "dit", "vae_decoder")
FORMATS = ("fp8", "nvfp4", "int8", "int8_weights", "keep")
COMPUTE = ("fp32", "bf16")


@dataclass(frozen=True)
class EngineRecipe:
    """What becomes of one engine; `name` is the recipe's, `where` names both in errors."""

    name: str
    where: str
    compute: str = "fp32"
    formats: dict[str, list[str]] = field(default_factory=dict)
    smooth: float | None = None
    edge_blocks: int = 0
    edge_format: str = "keep"
    attention: str | None = None

    def edges(self, blocks: int) -> set[int]:
        """The blocks at either end that `edge_format` is for, of so many; their attention stays."""
        edge = min(self.edge_blocks, blocks // 3)
        return {*range(edge), *range(blocks - edge, blocks)}

    def assign(self, layers: Iterable[str], blocks: int) -> dict[str, str]:
        """The format of each layer that does not stay as it is.

        blocks: how many there are in the engine. Raises ExportError, which names a layer that no
        pattern or more than one matches, or a pattern that matches nothing.
        """
        if not self.formats:
            return {}
        patterns = [(pattern, name) for name, found in self.formats.items() for pattern in found]
        used = set()
        result = {}
        edges = self.edges(blocks)
        for layer in layers:
            matches = [(pattern, name) for pattern, name in patterns if fnmatchcase(layer, pattern)]
            if len(matches) != 1:
                found = " and ".join(f"{p!r} ({name})" for p, name in matches) or "no pattern"
                raise ExportError(f"{self.where}: the layer {layer} matches {found}, not just one")
            used.add(matches[0][0])
            chosen = matches[0][1]
            if chosen != "keep" and block_of(layer) in edges:
                chosen = self.edge_format
            if chosen != "keep":
                result[layer] = chosen
        for pattern, name in patterns:
            if pattern not in used:
                raise ExportError(
                    f"{self.where}: the pattern {pattern!r} ({name}) matches no layer"
                )
        return result


def block_of(layer: str) -> int | None:
    """The number of the block that a layer belongs to."""
    return next((int(part) for part in layer.split(".") if part.isdecimal()), None)


def load_recipe(name: str) -> dict[str, EngineRecipe]:
    """`export/recipes/<name>.yaml`, by engine. Raises ExportError."""
    names = sorted(path.stem for path in RECIPES.glob("*.yaml"))
    if name not in names:
        raise ExportError(f"there is no recipe {name!r}; the recipes are {', '.join(names)}")
    return parse_recipe(name, read_yaml(RECIPES / f"{name}.yaml"))


def read_yaml(path: Path) -> Any:
    """What a YAML file holds. Raises ExportError."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise ExportError(f"{path} is no text in UTF-8") from None
    except OSError as error:
        raise ExportError(f"{path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ExportError(f"{path} is no YAML: {' '.join(str(error).split())}") from None


def parse_recipe(name: str, data: Any) -> dict[str, EngineRecipe]:
    if not isinstance(data, dict):
        raise ExportError(f"the recipe {name!r} must hold engines")
    _check(f"recipe {name!r}", data, ENGINES)
    return {
        engine: _engine(name, f"recipe {name!r}, {engine}", entry) for engine, entry in data.items()
    }


def _engine(name: str, where: str, entry: Any) -> EngineRecipe:
    if not isinstance(entry, dict):
        raise ExportError(f"{where} must hold names and values")
    _check(
        where, entry, ("compute", "formats", "smooth", "edge_blocks", "edge_format", "attention")
    )
    compute = entry.get("compute", "fp32")
    if compute not in COMPUTE:
        raise ExportError(
            f"{where}: compute is {compute!r}; it must be one of {', '.join(COMPUTE)}"
        )
    formats = entry.get("formats") or {}
    if not isinstance(formats, dict) or not all(
        isinstance(patterns, list) and all(isinstance(pattern, str) for pattern in patterns)
        for patterns in formats.values()
    ):
        raise ExportError(f"{where}: formats must hold lists of patterns")
    _check(f"{where}: formats", formats, FORMATS)
    smooth = entry.get("smooth")
    if smooth is not None and not (isinstance(smooth, float) and 0 < smooth < 1):
        raise ExportError(f"{where}: smooth is {smooth!r}; it must be between 0 and 1")
    edge = entry.get("edge_blocks", 0)
    if type(edge) is not int or edge < 0:
        raise ExportError(f"{where}: edge_blocks is {edge!r}; it must be a whole number from 0")
    edge_format = entry.get("edge_format", "keep")
    if edge_format not in FORMATS:
        raise ExportError(
            f"{where}: edge_format is {edge_format!r}; it must be one of {', '.join(FORMATS)}"
        )
    if smooth is not None and edge_format != "int8" and not formats.get("int8"):
        raise ExportError(f"{where}: smooth is for the format int8, which has no layers here")
    attention = entry.get("attention")
    if attention not in (None, "fp8") or (attention and not where.endswith(", dit")):
        raise ExportError(f"{where}: attention is {attention!r}; it can be fp8, for dit alone")
    return EngineRecipe(name, where, compute, formats, smooth, edge, edge_format, attention)


def _check(where: str, values: dict[str, Any], known: tuple[str, ...]) -> None:
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            raise ExportError(f"{where}: {key!r} is unknown: {hint}")
