"""Distances of pictures with known answers."""

import numpy as np
import pytest

from quality.distances import cosine, distances


@pytest.fixture
def picture():
    return np.random.default_rng(0).integers(0, 250, (48, 64, 3), dtype=np.uint8)


def test_equal_pictures(picture):
    assert distances(picture, picture) == {
        "psnr": 100.0,
        "ssim": pytest.approx(1.0),
        "flip": pytest.approx(0.0, abs=1e-6),
        "largest_difference": 0,
    }


def test_one_level_everywhere(picture):
    found = distances(picture + np.uint8(1), picture)
    assert found["psnr"] == pytest.approx(20 * np.log10(255), abs=1e-6)  # an error of 1
    assert found["largest_difference"] == 1
    assert 0.99 < found["ssim"] < 1.0


def test_a_worse_picture_is_farther_in_every_measure(picture):
    noise = np.random.default_rng(1).integers(-40, 40, picture.shape)
    near = np.clip(picture + noise // 8, 0, 255).astype(np.uint8)
    far = np.clip(picture + noise, 0, 255).astype(np.uint8)
    one, other = distances(near, picture), distances(far, picture)
    assert one["psnr"] > other["psnr"]
    assert one["ssim"] > other["ssim"]
    assert one["flip"] < other["flip"]
    assert one["largest_difference"] < other["largest_difference"]


def test_flip_of_black_and_white_is_nearly_one():
    black, white = np.zeros((32, 32, 3), np.uint8), np.full((32, 32, 3), 255, np.uint8)
    assert distances(black, white)["flip"] > 0.9


def test_cosine():
    assert cosine(np.array([[1.0, 2.0]]), np.array([[2.0, 4.0]])) == pytest.approx(1.0)
    assert cosine(np.array([1.0, 0.0]), np.array([0.0, 3.0])) == 0.0
    assert cosine(np.array([1.0]), np.array([-1.0])) == -1.0
    assert cosine(np.zeros(3), np.ones(3)) == 0.0
