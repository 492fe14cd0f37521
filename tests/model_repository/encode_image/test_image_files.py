import base64
import io

import numpy as np
import pytest
from PIL import Image

from image_files import encode

PIXELS = np.random.default_rng(0).integers(0, 256, (32, 48, 3), dtype=np.uint8)


def decoded(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


def test_png_keeps_every_pixel():
    assert np.array_equal(np.array(decoded(encode(PIXELS, "png", "bytes"))), PIXELS)


@pytest.mark.parametrize("output_format", ["png", "jpeg", "webp"])
def test_formats_are_what_they_say(output_format):
    picture = decoded(encode(PIXELS, output_format, "bytes"))
    assert picture.format == output_format.upper()
    assert picture.size == (48, 32)


@pytest.mark.parametrize("output_format", ["jpeg", "webp"])
def test_lossy_formats_stay_close(output_format):
    smooth = np.add.outer(np.arange(64), np.arange(64)).astype(np.uint8)[..., None].repeat(3, -1)
    picture = np.array(decoded(encode(smooth, output_format, "bytes"))).astype(int)
    assert np.abs(picture - smooth).mean() < 3


def test_b64_is_the_same_file_as_text():
    assert base64.b64decode(encode(PIXELS, "png", "b64")) == encode(PIXELS, "png", "bytes")
