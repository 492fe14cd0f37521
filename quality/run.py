"""A run: every prompt of a gate drawn, judged and compared; its folder, and reading it back.

quality.json       scores with intervals, parts, distances, verdicts, and every picture's own
contact_sheet.png  the pictures, in the prompts' order
pictures/          one PNG a prompt
noise.npz          single noise predictions and what they were asked for
"""

from __future__ import annotations

import json
import zipfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from build.profile import BuildError
from build.swap import replaced_when_done
from export.files import reason
from quality.captions import LANGUAGES
from quality.distances import cosine, distances
from quality.gate import Gate, QualityError
from quality.intervals import mean_with_interval, paired_difference
from quality.judge import ASPECTS, judge
from quality.sheet import contact_sheet, thumbnail
from quality.source import Source

RESULT, SHEET, PICTURES, NOISE = "quality.json", "contact_sheet.png", "pictures", "noise.npz"
FORMAT = 1
_PACKAGES = ("numpy", "scipy", "scikit-image", "flip-evaluator", "pillow")
_NOISE_SEED = 0

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Run:
    """A finished run: its folder and its quality.json."""

    folder: Path
    result: dict[str, Any]

    def picture(self, number: int) -> np.ndarray:
        """uint8 [H, W, 3]. Raises QualityError if it is not there."""
        path = self.folder / PICTURES / picture_name(number)
        try:
            with Image.open(path) as image:
                return np.asarray(image.convert("RGB"))
        except OSError as error:
            raise QualityError(f"{path} cannot be read: {error.strerror or error}") from None

    def noise(self) -> dict[str, np.ndarray] | None:
        """The arrays of noise.npz; None where the run made none."""
        path = self.folder / NOISE
        try:
            with np.load(path) as arrays:
                noise = dict(arrays)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, EOFError, TypeError, zipfile.BadZipFile) as error:
            raise QualityError(f"{path} cannot be read: {error}") from None
        levels = range(len(noise.get("levels", ())))
        numbers = [name.removeprefix("latents_") for name in noise if name.startswith("latents_")]
        for name in ("levels", *(f"predicted_{n}_{i}" for n in numbers for i in levels)):
            if name not in noise:
                raise QualityError(f"{path} is damaged: it has no {name}")
        return noise


def picture_name(number: int) -> str:
    return f"{number:04}.png"


def load_run(folder: Path) -> Run:
    """Raises QualityError where `folder` is not a run's."""
    path = folder / RESULT
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise QualityError(f"{folder} holds no {RESULT}: it is no run of the gate") from None
    except (OSError, ValueError, RecursionError) as error:
        raise QualityError(f"{path} cannot be read: {error}") from None
    if not isinstance(result, dict) or result.get("format") != FORMAT:
        raise QualityError(f"{path} is not a result of this version (format {FORMAT})")
    missing = [name for name in ("prompts", "source", "date", "pictures") if name not in result]
    if missing or not result["pictures"]:
        raise QualityError(f"{path} is damaged: it has no {missing[0] if missing else 'pictures'}")
    return Run(folder, result)


def measure(
    gate: Gate,
    source: Source,
    out: Path,
    reference: Run | None,
    progress: Progress,
) -> dict[str, Any]:
    """Runs the gate and puts the run into `out`, which is replaced at the end or left untouched.

    Returns the result as in quality.json. Raises QualityError.
    """
    if reference is not None and reference.result["prompts"] != gate.prompts_digest:
        raise QualityError(
            f"{reference.folder} is a run of other prompts than those of {gate.folder}: "
            "run the gate there again"
        )
    if reference is not None and out.resolve() == reference.folder.resolve():
        raise QualityError(f"{out} is the reference itself: name another folder")
    if out.exists() and not out.is_dir():
        raise QualityError(f"{out} is not a folder: name another one")
    if out.is_dir() and any(out.iterdir()):
        others = {path.name for path in out.iterdir()} - {RESULT, SHEET, PICTURES, NOISE}
        if others or not (out / RESULT).exists():
            raise QualityError(
                f"{out} is not empty and holds {min(others) if others else 'no run'}: name another "
                "folder"
            )
        load_run(out)
    try:
        with replaced_when_done(out) as staging:
            (staging / PICTURES).mkdir()
            pictures, sheet = _draw(gate, source, staging / PICTURES, reference, progress)
            sheet.save(staging / SHEET)
            noise = _predict(gate, source, staging / NOISE, reference, progress)
            result = _result(gate, source, pictures, noise, reference)
            text = json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False)
            (staging / RESULT).write_text(text + "\n", encoding="utf-8")
    except BuildError:
        raise QualityError(f"another run into {out} is under way: wait for it") from None
    except OSError as error:
        raise QualityError(reason(error, out)) from None
    return result


def _draw(
    gate: Gate, source: Source, folder: Path, reference: Run | None, progress: Progress
) -> tuple[list[dict[str, Any]], Image.Image]:
    """Draws every picture; returns what is to be said of each, and the contact sheet."""
    count = len(gate.prompts)
    entries: dict[int, dict[str, Any]] = {}
    thumbnails: dict[int, np.ndarray] = {}
    progress("pictures", 0, count)
    for number, pixels in source.draw(gate.prompts):
        prompt = gate.prompts[number]
        entry: dict[str, Any] = {**prompt.fields, "language": prompt.language}
        entry["width"], entry["height"] = pixels.shape[1], pixels.shape[0]
        if gate.judge:
            verdict = judge(prompt.text, pixels)
            entry["score"], entry["parts"] = verdict.score, verdict.parts
            # The picture of every prompt judged by the next prompt.
            other = gate.prompts[(number + 1) % count]
            entry["score_shuffled"] = judge(other.text, pixels).score
        if reference is not None:
            theirs = reference.picture(number)
            if theirs.shape != pixels.shape:
                raise QualityError(
                    f"picture {number} is {pixels.shape[1]}×{pixels.shape[0]}, that of "
                    f"{reference.folder} {theirs.shape[1]}×{theirs.shape[0]}"
                )
            entry |= distances(pixels, theirs)
        Image.fromarray(pixels).save(folder / picture_name(number))
        entries[number] = entry
        thumbnails[number] = np.asarray(thumbnail(pixels))
        progress("pictures", len(entries), count)
    ordered = [entries[i] for i in range(count)]
    labels = [
        f"{i} · {entry['score']:.2f}" if gate.judge else str(i) for i, entry in enumerate(ordered)
    ]
    return ordered, contact_sheet([thumbnails[i] for i in range(count)], labels)


def _predict(
    gate: Gate, source: Source, file: Path, reference: Run | None, progress: Progress
) -> dict[str, list[float]] | None:
    """Predicts noise, once each for some prompts at the gate's levels, and keeps it in `file`.

    Inputs are the reference's, or else this run's own latents, mixed with noise. Returns for each
    level the cosines to the reference's predictions, or None without any.
    """
    if not gate.noise_levels:
        return None
    theirs = reference.noise() if reference is not None else None
    ours = theirs and {name: x for name, x in theirs.items() if not name.startswith("predicted")}
    if ours is None:
        ours = _noise_inputs(gate, source)
    levels = ours["levels"].tolist()
    numbers = sorted(int(name.split("_")[1]) for name in ours if name.startswith("latents_"))
    cosines: dict[str, list[float]] = {f"{level:g}": [] for level in levels}
    for done, number in enumerate(numbers):
        progress("noise predictions", done, len(numbers))
        for i, level in enumerate(levels):
            latents = ours[f"latents_{number}"][i]
            predicted = source.predict_noise(gate.prompts[number], latents, level)
            if not np.isfinite(predicted).all():
                raise QualityError(
                    f"the engine is broken: its noise prediction for prompt {number} at the noise "
                    f"level {level:g} is not finite"
                )
            ours[f"predicted_{number}_{i}"] = predicted
            if theirs is not None:
                cosines[f"{level:g}"].append(cosine(predicted, theirs[f"predicted_{number}_{i}"]))
    progress("noise predictions", len(numbers), len(numbers))
    np.savez(file, **ours)
    return None if theirs is None else cosines


def _noise_inputs(gate: Gate, source: Source) -> dict[str, np.ndarray]:
    """{"levels": [n], "latents_<prompt>": FP32 [n, 16, h, w] for some prompts}.

    At the level s: (1 − s) · latents + s · noise, as rectified flow mixes them, with the pictures'
    latents brought to mean 0 and variance 1 a channel, which the transformer takes them at.
    """
    pictures = {number: source.latents(gate.prompts[number]) for number in gate.noise_indices()}
    flat = np.concatenate([x.reshape(x.shape[0], -1) for x in pictures.values()], axis=1)
    mean, std = flat.mean(1)[:, None, None], flat.std(1)[:, None, None] + 1e-6
    rng = np.random.default_rng(_NOISE_SEED)
    levels = np.array(gate.noise_levels, np.float32)
    mixed: dict[str, np.ndarray] = {"levels": levels}
    for number, latents in pictures.items():
        share = levels[:, None, None, None]
        noise = rng.standard_normal((len(levels), *latents.shape), np.float32)
        mixed[f"latents_{number}"] = (1 - share) * ((latents - mean) / std) + share * noise
    return mixed


def _result(
    gate: Gate,
    source: Source,
    pictures: list[dict[str, Any]],
    cosines: dict[str, list[float]] | None,
    reference: Run | None,
) -> dict[str, Any]:
    described = source.describe()
    result: dict[str, Any] = {
        "format": FORMAT,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "source": described["source"],
        "checkpoint": described["checkpoint"],
        "gate": gate.folder.name,
        "prompts": gate.prompts_digest,
        "fields": gate.fields,
        "versions": {**described["versions"], **{name: version(name) for name in _PACKAGES}},
    }
    if gate.judge:
        result |= _scores(pictures)
    if reference is not None:
        result["distances"] = {
            "reference": f"{reference.result['source']} of {reference.result['date']}",
            **{
                name: float(np.mean([p[name] for p in pictures]))
                for name in ("psnr", "ssim", "flip")
            },
            "largest_difference": max(p["largest_difference"] for p in pictures),
        }
        if cosines:
            result["noise_cosine"] = {
                level: {"mean": float(np.mean(values)), "lowest": min(values)}
                for level, values in cosines.items()
            } | {"lowest": min(min(values) for values in cosines.values())}
    result["pictures"] = pictures
    if gate.judge and reference is not None and "score" in reference.result:
        result["comparison"] = compare(reference.result, result, gate.significance)
    if not gate.changed:
        judged, missed = _judged(gate, result)
        result["passed"] = not missed if judged else None
        result["missed"] = missed
    return result


def _scores(pictures: list[dict[str, Any]]) -> dict[str, Any]:
    everything = mean_with_interval([p["score"] for p in pictures])
    groups: dict[str, list[float]] = defaultdict(list)
    for p in pictures:
        if p["language"]:
            groups[p["language"]].append(p["score"])
        groups[f"{p['width']}x{p['height']}"].append(p["score"])
    parts = {a: [p["parts"][a] for p in pictures if a in p["parts"]] for a in ASPECTS}
    scores = {
        "score": everything["score"],
        "score_low": everything["low"],
        "score_high": everything["high"],
        **{
            f"score_{language}": float(np.mean(groups[language]))
            for language in LANGUAGES
            if language in groups
        },
        "score_shuffled": float(np.mean([p["score_shuffled"] for p in pictures])),
    }
    return scores | {
        "groups": {name: mean_with_interval(groups[name]) for name in sorted(groups, key=_order)},
        "parts": {name: mean_with_interval(values) for name, values in parts.items() if values},
    }


def _order(group: str) -> tuple[bool, str]:
    """Languages first, then sizes."""
    return "x" in group, group


def compare(first: dict[str, Any], second: dict[str, Any], significance: float) -> dict[str, Any]:
    """Whether the second of two results of the same prompts is worse than chance would explain.

    By the scores of the pictures; without a judge by their FLIP distances to the same reference.
    Raises QualityError where the two have nothing to be compared by.
    """
    if first["prompts"] != second["prompts"]:
        raise QualityError("the two results are of different prompts: run the same gate for both")
    one, two = first["pictures"], second["pictures"]
    if "score" in one[0] and "score" in two[0]:
        measure, sign = "score", 1.0
    elif (
        "flip" in one[0]
        and "flip" in two[0]
        and (first["distances"]["reference"] == second["distances"]["reference"])
    ):
        measure, sign = "flip", -1.0
    else:
        raise QualityError(
            "the two results have neither a judge's scores nor distances to the same reference: "
            "run both with the same REFERENCE"
        )
    found = paired_difference(
        [sign * p[measure] for p in one], [sign * p[measure] for p in two], significance
    )
    if measure == "flip":  # there, less is better
        found["first"], found["second"] = 0.0 - found["first"], 0.0 - found["second"]
        found["difference"] = 0.0 - found["difference"]
        found["low"], found["high"] = 0.0 - found["high"], 0.0 - found["low"]
    return {"measure": measure, **found}


def _judged(gate: Gate, result: dict[str, Any]) -> tuple[bool, list[str]]:
    """Whether there was anything to judge by, and a sentence for each threshold that is missed."""
    judged, sentences = "comparison" in result, []
    for thresholds, word, sign in ((gate.at_least, "least", 1), (gate.at_most, "most", -1)):
        for name, threshold in thresholds.items():
            value: Any = result
            for key in name.split("."):
                value = value.get(key) if isinstance(value, dict) else None
            if value is None and name.split(".")[0] in ("distances", "noise_cosine"):
                continue  # without a reference there are none
            if value is None:
                raise QualityError(
                    f"{gate.folder}: this run has no {name!r} to hold a threshold to"
                )
            judged = True
            if not sign * value >= sign * threshold:
                sentences.append(f"{name} is {value:.4g}; it must be at {word} {threshold:g}")
    comparison = result.get("comparison")
    if comparison and comparison["worse"]:
        sentences.append(f"worse than the reference: {describe_comparison(comparison)}")
    return judged, sentences


def describe_comparison(comparison: dict[str, Any]) -> str:
    low, high = comparison["low"], comparison["high"]
    few = "" if comparison["decidable"] else ", too few prompts to tell"
    return (
        f"{comparison['measure']} {comparison['first']:.3f} → {comparison['second']:.3f}, "
        f"difference {comparison['difference']:+.3f} ({low:+.3f} … {high:+.3f}), "
        f"p = {comparison['p_value']:.4f}{few}"
    )
