"""A gate: the prompts that a service is measured with, and what it must reach."""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from quality.captions import read

SETTINGS, PROMPTS = "gate.yaml", "prompts.jsonl"
JUDGES = ("world",)
# What thresholds may be set for, by their names in quality.json.
SCORES = ("score", "score_low", "score_high", "score_en", "score_zh", "score_shuffled")
JUDGED_PARTS = r"(groups|parts)\.[^.]+\.(score|low|high)"
DISTANCES = tuple(f"distances.{x}" for x in ("psnr", "ssim", "flip", "largest_difference"))
NOISE_COSINE = "noise_cosine.lowest"
_PROMPT_FIELDS: dict[str, type | tuple[type, ...]] = {
    "prompt": str,
    "seed": int,
    "height": int,
    "width": int,
    "negative_prompt": str,
    "language": str,
}
_REQUEST_FIELDS: dict[str, type | tuple[type, ...]] = {
    "negative_prompt": str,
    "num_inference_steps": int,
    "true_cfg_scale": (int, float),
    "height": int,
    "width": int,
}


class QualityError(Exception):
    """One sentence for the user."""


@dataclass(frozen=True)
class Prompt:
    """A request of the gate: its `fields` as `qwen_image` takes them, prompt and seed included."""

    fields: dict[str, Any]
    language: str | None = None

    @property
    def text(self) -> str:
        return str(self.fields["prompt"])


@dataclass(frozen=True)
class Gate:
    """What gate.yaml and prompts.jsonl say; `changed` once other fields than theirs are taken."""

    folder: Path
    prompts: tuple[Prompt, ...]
    prompts_digest: str
    fields: dict[str, Any]
    judge: str | None
    noise_levels: tuple[float, ...]
    noise_prompts: int
    reference: Path | None
    at_least: dict[str, float]
    at_most: dict[str, float]
    significance: float
    changed: bool = False

    def with_fields(self, **fields: Any) -> Gate:
        """The same prompts asked with other fields, by which the thresholds do not hold."""
        if all(self.fields.get(name) == value for name, value in fields.items()):
            return self
        prompts = tuple(replace(p, fields={**p.fields, **fields}) for p in self.prompts)
        return replace(self, prompts=prompts, fields={**self.fields, **fields}, changed=True)

    def noise_indices(self) -> list[int]:
        """The prompts whose single noise predictions are compared."""
        count = min(self.noise_prompts, len(self.prompts))
        return [i * len(self.prompts) // count for i in range(count)]


def load_gate(folder: Path) -> Gate:
    """Reads a gate. Raises QualityError, which names what is wrong and where."""
    path = folder / SETTINGS
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
        lines = (folder / PROMPTS).read_bytes()
    except FileNotFoundError as error:
        raise QualityError(
            f"{folder} is no gate: {error.filename} is missing (a gate is a folder with "
            f"{SETTINGS} and {PROMPTS})"
        ) from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise QualityError(f"{folder} cannot be read: {' '.join(str(error).split())}") from None
    settings = {} if settings is None else settings
    if not isinstance(settings, dict):
        raise QualityError(f"{path} must hold names and values")
    names = ("judge", "fields", "noise_levels", "noise_prompts", "reference", "at_least")
    _check_names(path, settings, (*names, "at_most", "significance"))
    fields = settings.get("fields") or {}
    _check_values(f"{path}: fields", fields, _REQUEST_FIELDS)
    judge = settings.get("judge")
    if judge not in (None, *JUDGES):
        raise QualityError(f"{path}: judge is {judge!r}; it must be {JUDGES[0]!r} or left out")
    levels = settings.get("noise_levels") or []
    if not isinstance(levels, list) or not all(_is_number(x) and 0 < x <= 1 for x in levels):
        raise QualityError(f"{path}: noise_levels must be a list of numbers above 0, up to 1")
    count = settings.get("noise_prompts", 8)
    if not isinstance(count, int) or count < 1:
        raise QualityError(f"{path}: noise_prompts is {count!r}; it must be a number from 1")
    significance = settings.get("significance", 0.01)
    if not _is_number(significance) or not 0 < significance < 1:
        raise QualityError(f"{path}: significance is {significance!r}; it must be between 0 and 1")
    reference = settings.get("reference")
    if reference is not None and not isinstance(reference, str):
        raise QualityError(f"{path}: reference is {reference!r}; it must be a folder's name")
    at_least = _thresholds(path, settings, "at_least")
    at_most = _thresholds(path, settings, "at_most")
    for name in (*at_least, *at_most):
        _check_threshold(path, name, judge, bool(levels))
    return Gate(
        folder,
        _prompts(folder / PROMPTS, lines, fields, judge),
        hashlib.sha256(lines).hexdigest(),
        fields,
        judge,
        tuple(float(level) for level in levels),
        count,
        folder / reference if reference else None,
        at_least,
        at_most,
        significance,
    )


def _prompts(
    path: Path, lines: bytes, fields: dict[str, Any], judge: str | None
) -> tuple[Prompt, ...]:
    prompts = []
    for number, line in enumerate(lines.splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            raise QualityError(f"{where} is not JSON") from None
        _check_values(where, entry, _PROMPT_FIELDS)
        for name in ("prompt", "seed"):
            if name not in entry:
                raise QualityError(f"{where} has no {name}")
        if judge == "world":
            try:
                read(entry["prompt"])
            except ValueError as error:
                raise QualityError(f"{where}: the judge cannot read it: {error}") from None
        language = entry.pop("language", None)
        prompts.append(Prompt({**fields, **entry}, language))
    if len(prompts) < 2:
        raise QualityError(f"{path} holds {len(prompts)} prompts; a gate needs at least two")
    return tuple(prompts)


def _thresholds(path: Path, settings: Mapping[str, Any], name: str) -> dict[str, float]:
    values = settings.get(name) or {}
    if not isinstance(values, dict) or not all(_is_number(v) for v in values.values()):
        raise QualityError(f"{path}: {name} must hold names of quality.json and numbers")
    return {str(key): float(value) for key, value in values.items()}


def _check_threshold(path: Path, name: str, judge: str | None, has_levels: bool) -> None:
    """A misspelt threshold would never be missed."""
    judged = name in SCORES or bool(re.fullmatch(JUDGED_PARTS, name))
    if judged and judge is None:
        raise QualityError(f"{path}: {name!r} takes a judge, and this gate has none")
    if name == NOISE_COSINE and not has_levels:
        raise QualityError(f"{path}: {name!r} takes noise_levels, and this gate has none")
    known = (*SCORES, *DISTANCES, NOISE_COSINE)
    if not judged and name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
        raise QualityError(f"{path}: {name!r} is no threshold: {hint}")


def _check_values(where: str, values: Any, types: Mapping[str, type | tuple[type, ...]]) -> None:
    if not isinstance(values, dict):
        raise QualityError(f"{where} must hold names and values")
    _check_names(where, values, tuple(types))
    for name, value in values.items():
        if not isinstance(value, types[name]) or isinstance(value, bool):
            wanted = types[name] if isinstance(types[name], type) else float
            raise QualityError(f"{where}: {name} is {value!r}; it must be {_KINDS[wanted]}")


_KINDS: dict[Any, str] = {str: "a text", int: "a whole number", float: "a number"}


def _check_names(where: Any, values: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            raise QualityError(f"{where}: {name!r} is unknown: {hint}")


def _is_number(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value)
