"""How far a picture is from another one of the same size."""

from __future__ import annotations

import flip_evaluator
import numpy as np
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

PSNR_OF_EQUALS = 100.0  # dB, instead of infinity; a single level in a thousand pixels gives 78


def distances(picture: np.ndarray, reference: np.ndarray) -> dict[str, float]:
    """Distances of two pictures, each uint8 [H, W, 3].

    "psnr": peak signal-to-noise ratio in dB, `PSNR_OF_EQUALS` for equal pictures. "ssim": with
    the Gaussian window of Wang et al. 2004. "flip": NVIDIA's FLIP (Andersson et al. 2020), the
    difference that a viewer flipping between the two would see, 0 … 1, at its default 67 pixels
    a degree. "largest_difference": of any channel of any pixel, 0 … 255.
    """
    mse = float(np.mean((picture.astype(np.float64) - reference) ** 2))
    return {
        "psnr": float(peak_signal_noise_ratio(reference, picture)) if mse else PSNR_OF_EQUALS,
        "ssim": float(
            structural_similarity(
                reference,
                picture,
                channel_axis=2,
                gaussian_weights=True,
                sigma=1.5,
                use_sample_covariance=False,
            )
        ),
        "flip": float(
            flip_evaluator.evaluate(_unit(reference), _unit(picture), "LDR", applyMagma=False)[1]
        ),
        "largest_difference": int(np.abs(picture.astype(int) - reference).max()),
    }


def _unit(picture: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(picture, np.float32) / np.float32(255)


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    """Cosine of the angle between two arrays taken as vectors; 0 if one of them is nought."""
    a, b = one.astype(np.float64).ravel(), other.astype(np.float64).ravel()
    lengths = np.linalg.norm(a) * np.linalg.norm(b)
    return float(a @ b / lengths) if lengths else 0.0
