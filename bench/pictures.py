"""What a picture file costs: CPU time and bytes of every format at 1024², against Pillow's PNG.

    python -m bench.pictures

Times are the process's CPU time, a median, as ratios to Pillow's PNG of level 1 of the same
picture, measured in turn. Photographs come with scikit-image and are smaller or larger than 1024²:
each is taken resized (smooth) and mirrored or cropped to size (sharp). Noise is the worst case, a
drawing the best.
"""

from __future__ import annotations

import argparse
import io
import runpy
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from skimage import data

from bench.common import ROOT, versions, write_result

SIDE = 1024
REPEATS = 7
BASE = "png_pillow_1"
PHOTOGRAPHS = ("astronaut", "chelsea", "coffee", "retina")
DRAWING = ROOT / "checkpoints" / "tiny" / "pictures" / "circle-and-square.png"

encode = runpy.run_path(str(ROOT / "model_repository/encode_image/1/image_files.py"))["encode"]
Pixels = NDArray[np.uint8]


def pillow_png(pixels: Pixels, level: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="png", compress_level=level)
    return buffer.getvalue()


ENCODERS: dict[str, Callable[[Pixels], bytes]] = {
    BASE: partial(pillow_png, level=1),
    "png_pillow_6": partial(pillow_png, level=6),
    **{
        name: partial(encode, output_format=name, response_format="bytes")
        for name in ("png", "jpeg", "webp")
    },
}


def resized(image: Image.Image) -> Pixels:
    side = min(image.size)
    square = image.convert("RGB").crop((0, 0, side, side))
    return np.array(square.resize((SIDE, SIDE), Image.Resampling.LANCZOS))


def mirrored(pixels: Pixels) -> Pixels:
    pixels = pixels[:SIDE, :SIDE]
    height, width = pixels.shape[:2]
    return np.pad(pixels, ((0, SIDE - height), (0, SIDE - width), (0, 0)), "symmetric")


def pictures() -> dict[str, Pixels]:
    found = {}
    for name in PHOTOGRAPHS:
        pixels = getattr(data, name)()
        found[f"{name}, resized"] = resized(Image.fromarray(pixels))
        found[f"{name}, its pixels"] = mirrored(pixels)
    found["noise"] = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    found["drawing"] = resized(Image.open(DRAWING))
    return found


def measure(pixels: Pixels) -> dict[str, Any]:
    """Time and bytes a format, the time as a ratio to BASE's."""
    seconds: dict[str, list[float]] = {name: [] for name in ENCODERS}
    size = {name: len(encoder(pixels)) for name, encoder in ENCODERS.items()}
    for _ in range(REPEATS):
        for name, encoder in ENCODERS.items():
            started = time.process_time()
            encoder(pixels)
            seconds[name].append(time.process_time() - started)
    base = statistics.median(seconds[BASE])
    return {
        name: {
            "time": round(statistics.median(seconds[name]) / base, 3),
            "bytes": size[name],
            "size": round(size[name] / size[BASE], 3),
        }
        for name in ENCODERS
    }


def main() -> None:
    argparse.ArgumentParser(prog="python -m bench.pictures", description=__doc__).parse_args()
    measured = {}
    for name, pixels in pictures().items():
        measured[name] = measure(pixels)
        print(name, {k: (v["time"], v["size"]) for k, v in measured[name].items()}, flush=True)
    photographs = [measured[name] for name in measured if name.startswith(PHOTOGRAPHS)]
    values = {
        "versions": versions("pillow", "kornia-rs", "numpy", "scikit-image"),
        "ratios_to": BASE,
        "photographs": {
            encoder: {
                key: round(statistics.median(one[encoder][key] for one in photographs), 3)
                for key in ("time", "size")
            }
            for encoder in ENCODERS
        },
        "pictures": measured,
    }
    print(write_result("pictures", values))


if __name__ == "__main__":
    main()
