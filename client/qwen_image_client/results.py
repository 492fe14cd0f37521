"""What comes back, as plain data."""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from PIL import Image

from .errors import ServerError


@dataclass(frozen=True)
class Generation:
    """The answer to one request.

    encoded: the image files as the server made them (PNG, JPEG or WebP).
    seeds: the seed of each image; image i alone comes back with seeds[i].
    metadata: sizes, steps, token counts, `stages_ms`, cache hits, versions.
    """

    encoded: list[bytes]
    seeds: list[int]
    metadata: dict[str, Any]
    request_id: str

    @cached_property
    def images(self) -> list[Image.Image]:
        """The images, decoded on first use. Raises ServerError if one cannot be read."""
        images: list[Image.Image] = []
        for number, data in enumerate(self.encoded, 1):
            try:
                image = Image.open(io.BytesIO(data))
                image.load()
            except (OSError, ValueError, SyntaxError) as error:
                raise ServerError(
                    f"image {number} of {len(self.encoded)} cannot be decoded: {error}"
                ) from None
            images.append(image)
        return images


@dataclass(frozen=True)
class ModelStatus:
    """One version of a model. `state` is Triton's ("READY", "UNAVAILABLE", …), `reason` says why
    it is not ready, the counts are since the server's start, `mean_ms` is None before the first.
    """

    name: str
    version: str
    state: str
    reason: str
    succeeded: int
    failed: int
    mean_ms: float | None


@dataclass(frozen=True)
class ServerStatus:
    """ready: Triton and all of its models take requests.

    metrics: the `qwen_image_*` samples, by name and labels; empty unless asked for by URL.
    """

    ready: bool
    triton_version: str
    models: list[ModelStatus]
    metrics: dict[str, float]
