"""A contact sheet: many pictures on one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

CELL = 144  # pixels; the longest side of a picture on the sheet
GAP = 4
LABEL = 14


def contact_sheet(
    pictures: Sequence[np.ndarray],
    labels: Sequence[str] | None = None,
    columns: int | None = None,
) -> Image.Image:
    """Pictures, uint8 [H, W, 3] each, in rows, larger ones reduced; with a label below each."""
    columns = columns or max(1, math.ceil(math.sqrt(1.6 * len(pictures))))
    rows = math.ceil(len(pictures) / columns)
    step = CELL + GAP
    line = step + (LABEL if labels else 0)
    sheet = Image.new("RGB", (columns * step + GAP, rows * line + GAP), (128, 128, 128))
    draw = ImageDraw.Draw(sheet)
    for i, picture in enumerate(pictures):
        x, y = GAP + i % columns * step, GAP + i // columns * line
        sheet.paste(thumbnail(picture), (x, y))
        if labels:
            draw.text((x, y + CELL), labels[i], fill=(255, 255, 255))
    return sheet


def thumbnail(picture: np.ndarray) -> Image.Image:
    """The picture, no larger than a cell of the sheet."""
    image = Image.fromarray(picture)
    image.thumbnail((CELL, CELL), Image.Resampling.LANCZOS)
    return image
