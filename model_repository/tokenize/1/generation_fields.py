"""Judges every field of a generation request and fills in the defaults.

Pure Python: no Triton, no tokenizer. `judge` takes the raw values of the fields and returns a
`GenerationFields`, or raises `InvalidRequest` with one sentence that names the field, its value
and what is allowed.
"""

from __future__ import annotations

import difflib
import math
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

OUTPUT_FORMATS = ("png", "jpeg", "webp")
RESPONSE_FORMATS = ("bytes", "b64")

FIELDS = (
    "prompt",
    "negative_prompt",
    "num_inference_steps",
    "true_cfg_scale",
    "height",
    "width",
    "seed",
    "num_images_per_prompt",
    "output_format",
    "response_format",
)

# Names that other image services use for our fields and that spelling alone would not find.
FIELD_ALIASES = {
    "guidance_scale": "true_cfg_scale",
    "guidance": "true_cfg_scale",
    "cfg": "true_cfg_scale",
    "cfg_scale": "true_cfg_scale",
    "steps": "num_inference_steps",
    "n": "num_images_per_prompt",
    "num_images": "num_images_per_prompt",
    "size": "height",
    "text": "prompt",
    "generator": "seed",
    "format": "output_format",
}

# Triton's own request parameters, and the ones this model repository defines.
_KNOWN_PARAMETERS = {"timeout", "id", "priority"}
_KNOWN_PARAMETER_PREFIXES = ("triton_", "sequence_", "binary_data")


class InvalidRequest(ValueError):
    """A request that cannot be served as it stands; the message is for its sender."""


@dataclass(frozen=True)
class Limits:
    """What a profile allows. Sides are in pixels, the area in pixels of one image."""

    max_steps: int
    max_true_cfg_scale: float
    max_images: int
    min_side: int
    max_side: int
    max_pixels: int
    size_multiple: int
    default_height: int
    default_width: int

    @classmethod
    def from_parameters(
        cls, parameters: Mapping[str, str], checkpoint: Mapping[str, Any]
    ) -> Limits:
        """From the model's configuration and the repository's `checkpoint.json`.

        Raises:
            ValueError: a sentence that names a parameter that is missing or wrong.
        """

        def parameter(name: str) -> int:
            text = parameters.get(name, "")
            if not text.strip().isdecimal() or int(text) < 1:
                raise ValueError(
                    f"the parameter {name} is {text!r}; it must be a whole number from 1"
                )
            return int(text)

        return cls(
            max_steps=parameter("max_steps"),
            max_true_cfg_scale=parameter("max_true_cfg_scale"),
            max_images=parameter("max_images"),
            min_side=parameter("min_side"),
            max_side=parameter("max_side"),
            max_pixels=parameter("max_pixels"),
            size_multiple=checkpoint["size_multiple"],
            default_height=checkpoint["default_height"],
            default_width=checkpoint["default_width"],
        )


@dataclass(frozen=True)
class GenerationFields:
    """A request whose every field is valid."""

    prompt: str
    negative_prompt: str
    num_inference_steps: int
    true_cfg_scale: float
    height: int
    width: int
    seed: int
    num_images_per_prompt: int
    output_format: str
    response_format: str


def judge_parameters(names: Iterable[str]) -> None:
    """Refuses request parameters that nobody reads: they are misspelt fields.

    Raises:
        InvalidRequest: names the parameter and the field that it resembles most.
    """
    for name in names:
        if name in _KNOWN_PARAMETERS or name.startswith(_KNOWN_PARAMETER_PREFIXES):
            continue
        if name == "cancel":
            raise InvalidRequest(
                "the parameter 'cancel' belongs to the model 'denoise': send the request there"
            )
        if name in FIELDS:
            raise InvalidRequest(f"{name!r} is an input tensor: send it as one, not as a parameter")
        shown = _shown(name)
        nearest = FIELD_ALIASES.get(name.lower())
        if nearest is None:
            nearest = difflib.get_close_matches(shown.lower(), FIELDS, n=1, cutoff=0.0)[0]
        raise InvalidRequest(f"unknown parameter {shown!r}: did you mean {nearest!r}?")


def judge(raw: Mapping[str, bytes | int | float], limits: Limits) -> GenerationFields:
    """Checks the fields in the order of `FIELDS` and applies the defaults.

    Args:
        raw: the fields that were sent; text as the bytes that arrived.
        limits: what the profile allows.

    Raises:
        InvalidRequest: for the first field that is missing or out of its range.
    """
    if "prompt" not in raw:
        raise InvalidRequest("prompt is missing: send it as a BYTES tensor of shape [1]")
    prompt = _text("prompt", raw["prompt"])
    negative_prompt = _text("negative_prompt", raw.get("negative_prompt", b" "))
    steps = _integer("num_inference_steps", raw.get("num_inference_steps", 50), 1, limits.max_steps)

    scale = float(raw.get("true_cfg_scale", 4.0))
    if not math.isfinite(scale) or not 1.0 <= scale <= limits.max_true_cfg_scale:
        raise InvalidRequest(
            f"true_cfg_scale is {scale:g}; it must be a number from 1 (guidance off) to "
            f"{limits.max_true_cfg_scale:g}"
        )

    height = _side("height", raw.get("height", limits.default_height), limits)
    width = _side("width", raw.get("width", limits.default_width), limits)
    if height * width > limits.max_pixels:
        raise InvalidRequest(
            f"height × width is {height}×{width} = {height * width} pixels; "
            f"at most {limits.max_pixels} are allowed"
        )

    images = _integer(
        "num_images_per_prompt", raw.get("num_images_per_prompt", 1), 1, limits.max_images
    )
    if "seed" in raw:
        seed = _integer("seed", raw["seed"], 0, 2**63 - images)
    else:
        seed = secrets.randbelow(2**53 - images)
    return GenerationFields(
        prompt=prompt,
        negative_prompt=negative_prompt,
        num_inference_steps=steps,
        true_cfg_scale=scale,
        height=height,
        width=width,
        seed=seed,
        num_images_per_prompt=images,
        output_format=_choice("output_format", raw.get("output_format", b"png"), OUTPUT_FORMATS),
        response_format=_choice(
            "response_format", raw.get("response_format", b"bytes"), RESPONSE_FORMATS
        ),
    )


def _text(name: str, value: bytes | int | float) -> str:
    assert isinstance(value, bytes)
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"{name} is not UTF-8: byte 0x{value[error.start]:02x} at position {error.start} "
            "does not belong there; send UTF-8 text"
        ) from None


def _integer(name: str, value: bytes | int | float, low: int, high: int) -> int:
    assert not isinstance(value, bytes)
    number = int(value)
    if not low <= number <= high:
        raise InvalidRequest(f"{name} is {number}; it must be from {low} to {high}")
    return number


def _side(name: str, value: bytes | int | float, limits: Limits) -> int:
    assert not isinstance(value, bytes)
    side = int(value)
    multiple = limits.size_multiple
    if side % multiple or not limits.min_side <= side <= limits.max_side:
        raise InvalidRequest(
            f"{name} is {side}; it must be a multiple of {multiple} "
            f"from {limits.min_side} to {limits.max_side}"
        )
    return side


def _choice(name: str, value: bytes | int | float, choices: tuple[str, ...]) -> str:
    text = _text(name, value)
    if text not in choices:
        raise InvalidRequest(f"{name} is {_shown(text)!r}; it must be one of {', '.join(choices)}")
    return text


def _shown(text: str) -> str:
    return text if len(text) <= 40 else text[:40] + "…"
