"""A profile's sizes → the optimization profiles of an engine's inputs."""

from __future__ import annotations

from pathlib import Path

import onnx

from build.engine_builder import OptimizationProfile, ShapeRange
from build.profile import EngineProfile, Range

Dims = tuple[int | str, ...]


def optimization_profiles(
    engine: EngineProfile, inputs: dict[str, Dims], dropped_tokens: int
) -> list[OptimizationProfile]:
    """The ranges of an engine's inputs, for each of its optimization profiles.

    inputs: dimensions by name, free ones by the names that the graph gives them.
    dropped_tokens: how many tokens of its template the text encoder drops from its output.
    """
    profiles: list[OptimizationProfile] = []
    for sizes in engine.shapes:
        known = complete_sizes(sizes, dropped_tokens)
        profiles.append(
            {
                name: ShapeRange(
                    *(
                        tuple(known[dim][i] if isinstance(dim, str) else dim for dim in dims)
                        for i in range(3)
                    )
                )
                for name, dims in inputs.items()
            }
        )
    return profiles


def complete_sizes(sizes: dict[str, Range], dropped_tokens: int) -> dict[str, Range]:
    """The sizes with those that follow from them: `tokens` are the text encoder's, the template's
    among them; `all_tokens` are text and image together."""
    result = dict(sizes)
    if "text_tokens" in sizes:
        low, best, high = (dropped_tokens + size for size in sizes["text_tokens"])
        result["tokens"] = (low, best, high)
    if "image_tokens" in sizes:
        low, best, high = (
            text + image
            for text, image in zip(sizes["text_tokens"], sizes["image_tokens"], strict=True)
        )
        result["all_tokens"] = (low, best, high)
    return result


def graph_inputs(model: Path) -> dict[str, Dims]:
    """The dimensions of a graph's inputs by name; its weights are not read."""
    graph = onnx.load(model, load_external_data=False).graph
    return {
        value.name: tuple(
            dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim
        )
        for value in graph.input
    }
