import math
from typing import Any

import numpy as np
import pytest

from qwen_image_client import InvalidRequestError
from qwen_image_client.fields import check_timeout, encode_fields


def test_every_field_has_its_type_and_the_shape_1() -> None:
    tensors = encode_fields(
        {
            "prompt": "狐狸 🦊",
            "negative_prompt": "",
            "num_inference_steps": np.int64(20),
            "true_cfg_scale": 4,
            "height": 512,
            "width": 768,
            "seed": 2**62,
            "num_images_per_prompt": 2,
            "output_format": "webp",
        }
    )
    assert {name: (array.dtype, array.shape) for name, array in tensors.items()} == {
        "prompt": (object, (1,)),
        "negative_prompt": (object, (1,)),
        "num_inference_steps": (np.int32, (1,)),
        "true_cfg_scale": (np.float32, (1,)),
        "height": (np.int32, (1,)),
        "width": (np.int32, (1,)),
        "seed": (np.int64, (1,)),
        "num_images_per_prompt": (np.int32, (1,)),
        "output_format": (object, (1,)),
    }
    assert tensors["prompt"][0] == "狐狸 🦊".encode()
    assert tensors["seed"][0] == 2**62


def test_unset_fields_are_left_out() -> None:
    assert list(encode_fields({"prompt": "", "seed": None, "height": None})) == ["prompt"]


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("prompt", None, "prompt is missing: it must be text"),
        ("prompt", b"fox", "prompt must be text, got b'fox'"),
        (
            "prompt",
            "a\ud800",
            "prompt holds a lone surrogate at character 1, which is not valid Unicode text",
        ),
        ("height", 2**32 + 512, "height must fit 32 bits, got 4294967808"),
        ("seed", 2**63, "seed must fit 64 bits, got 9223372036854775808"),
        ("width", 512.0, "width must be an integer, got 512.0"),
        ("num_inference_steps", True, "num_inference_steps must be an integer, got True"),
        ("true_cfg_scale", "4", "true_cfg_scale must be a number, got '4'"),
    ],
)
def test_what_the_wire_cannot_hold_is_refused(field: str, value: Any, sentence: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        encode_fields({"prompt": "a", field: value})
    assert str(caught.value) == sentence


def test_numbers_that_only_the_server_can_judge_pass() -> None:
    tensors = encode_fields({"prompt": "a", "true_cfg_scale": math.nan, "seed": -1})
    assert np.isnan(tensors["true_cfg_scale"][0])
    assert tensors["seed"][0] == -1


@pytest.mark.parametrize("timeout", [0, -1.0, math.inf, math.nan, "3", True])
def test_wrong_timeouts_are_refused(timeout: Any) -> None:
    with pytest.raises(InvalidRequestError, match="timeout must be a positive number of seconds"):
        check_timeout(timeout)
