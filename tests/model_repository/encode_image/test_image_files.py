import base64
import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image
from skimage import data

from image_files import encode

PIXELS = np.random.default_rng(0).integers(0, 256, (32, 48, 3), dtype=np.uint8)


def decoded(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


@pytest.mark.parametrize(
    "pixels",
    [
        PIXELS,
        np.full((16, 4096, 3), 7, np.uint8),
        np.repeat(PIXELS, 40, axis=0),
        data.astronaut(),
        data.astronaut()[::3, ::-2],  # rows that are not contiguous
    ],
    ids=["noise", "flat", "runs", "photograph", "strided"],
)
def test_png_keeps_every_pixel(pixels):
    assert np.array_equal(np.array(decoded(encode(pixels, "png", "bytes"))), pixels)


def test_png_is_what_the_standard_says():
    """Decoders forgive different mistakes, so the file is read here as strictly as can be."""
    file = encode(data.astronaut(), "png", "bytes")
    assert file[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = [], 8
    while at < len(file):
        (length,) = struct.unpack_from(">I", file, at)
        body, (crc,) = (
            file[at + 4 : at + 8 + length],
            struct.unpack_from(">I", file, at + 8 + length),
        )
        assert zlib.crc32(body) == crc
        chunks.append((body[:4], body[4:]))
        at += 12 + length
    assert chunks[0] == (b"IHDR", struct.pack(">IIBBBBB", 512, 512, 8, 2, 0, 0, 0))
    assert chunks[-1] == (b"IEND", b"")
    assert {name for name, _ in chunks[1:-1]} == {b"IDAT"}
    stream = zlib.decompressobj()
    rows = stream.decompress(b"".join(body for _, body in chunks[1:-1]))
    assert stream.eof and not stream.unused_data
    assert len(rows) == 512 * (1 + 3 * 512)


def test_png_of_a_photograph_is_no_larger_than_pillows():
    buffer = io.BytesIO()
    Image.fromarray(data.astronaut()).save(buffer, "png", compress_level=1)
    assert len(encode(data.astronaut(), "png", "bytes")) < len(buffer.getvalue())


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
