"""Names of the tensors in an engine's model.safetensors."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import yaml

LAYOUT = Path(__file__).with_suffix(".yaml")


def layout(engine: str, names: Iterable[str]) -> dict[str, list[str]]:
    """The engine's tensors, and which of the checkpoint's tensors `names` lie in each, in order.

    Raises:
        KeyError: one that belongs into a joined tensor is missing.
    """
    joined = yaml.safe_load(LAYOUT.read_text(encoding="utf-8")).get(engine, {})
    given, result = list(names), dict[str, list[str]]()
    known = set(given)
    for name in given:
        layer, _, kind = name.rpartition(".")  # such as …to_q, weight
        for prefix, groups in joined.items():
            if layer.startswith(f"{prefix}."):
                number, _, short = layer.removeprefix(f"{prefix}.").partition(".")
                for packed, parts in groups.items():
                    if short in parts:
                        block = f"{prefix}.{number}"
                        sources = [f"{block}.{part}.{kind}" for part in parts]
                        if not known.issuperset(sources):
                            raise KeyError(f"{block}.{packed}.{kind} needs all of {sources}")
                        result[f"{block}.{packed}.{kind}"] = sources
                        break
                else:
                    result[name] = [name]
                break
        else:
            result[name] = [name]
    return result
