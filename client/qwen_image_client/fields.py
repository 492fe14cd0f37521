"""The fields of a request, as tensors."""

from __future__ import annotations

import math
import operator

import numpy as np

from .errors import InvalidRequestError

# Triton's type of every field of a request; each tensor has the shape [1].
FIELDS = {
    "prompt": "BYTES",
    "negative_prompt": "BYTES",
    "num_inference_steps": "INT32",
    "true_cfg_scale": "FP32",
    "height": "INT32",
    "width": "INT32",
    "seed": "INT64",
    "num_images_per_prompt": "INT32",
    "output_format": "BYTES",
}


def encode_fields(fields: dict[str, object]) -> dict[str, np.ndarray]:
    """Tensors of shape [1] for the fields that are set: BYTES as object, else the field's type.

    Judges only what cannot be put on the wire; the server judges the rest.
    Raises InvalidRequestError.
    """
    if fields.get("prompt") is None:
        raise InvalidRequestError("prompt is missing: it must be text")
    return {name: _encode(name, value) for name, value in fields.items() if value is not None}


def _encode(name: str, value: object) -> np.ndarray:
    wire_type = FIELDS[name]
    if wire_type == "BYTES":
        if not isinstance(value, str):
            raise InvalidRequestError(f"{name} must be text, got {value!r}")
        try:
            return np.array([value.encode()], dtype=object)
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"{name} holds a lone surrogate at character {error.start}, "
                "which is not valid Unicode text"
            ) from None
    if wire_type == "FP32":
        try:
            if isinstance(value, (str, bool)):
                raise TypeError
            return np.array([float(value)], dtype=np.float32)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            raise InvalidRequestError(f"{name} must be a number, got {value!r}") from None
    dtype = np.int32 if wire_type == "INT32" else np.int64
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidRequestError(f"{name} must be an integer, got {value!r}") from None
    limits = np.iinfo(dtype)
    if not limits.min <= number <= limits.max:
        raise InvalidRequestError(f"{name} must fit {limits.bits} bits, got {number}")
    return np.array([number], dtype=dtype)


def check_timeout(timeout: float | None) -> None:
    """Raises InvalidRequestError unless `timeout` is None or a positive number of seconds."""
    if timeout is None:
        return
    valid = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if not (valid and math.isfinite(timeout) and timeout > 0):
        raise InvalidRequestError(f"timeout must be a positive number of seconds, got {timeout!r}")
