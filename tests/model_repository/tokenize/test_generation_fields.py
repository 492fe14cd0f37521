import math

import pytest

from generation_fields import FIELDS, InvalidRequest, Limits, judge, judge_parameters

LIMITS = Limits(
    max_steps=100,
    max_true_cfg_scale=100.0,
    max_images=4,
    min_side=16,
    max_side=4096,
    max_pixels=1024 * 1024,
    size_multiple=16,
    default_height=512,
    default_width=768,
)


def test_defaults_are_those_of_the_interface():
    fields = judge({"prompt": b"a fox"}, LIMITS)
    assert fields.prompt == "a fox"
    assert fields.negative_prompt == " "
    assert (fields.num_inference_steps, fields.true_cfg_scale) == (50, 4.0)
    assert (fields.height, fields.width) == (512, 768)
    assert fields.num_images_per_prompt == 1
    assert (fields.output_format, fields.response_format) == ("png", "bytes")


def test_a_missing_seed_is_drawn_below_2_to_the_53():
    seeds = {judge({"prompt": b"x"}, LIMITS).seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(0 <= seed < 2**53 for seed in seeds)


def test_the_extremes_are_accepted():
    fields = judge(
        {
            "prompt": b"",
            "num_inference_steps": 100,
            "true_cfg_scale": 1.0,
            "height": 16,
            "width": 4096,
            "num_images_per_prompt": 4,
            "seed": 2**63 - 4,
            "output_format": b"webp",
            "response_format": b"b64",
        },
        LIMITS,
    )
    assert fields.seed == 2**63 - 4


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("prompt", b"ab\xff", ["0xff", "position 2", "UTF-8"]),
        ("negative_prompt", b"\x80", ["0x80", "UTF-8"]),
        ("num_inference_steps", 0, ["0", "from 1 to 100"]),
        ("num_inference_steps", -1, ["-1", "from 1 to 100"]),
        ("num_inference_steps", 101, ["101", "from 1 to 100"]),
        ("true_cfg_scale", math.nan, ["nan", "from 1"]),
        ("true_cfg_scale", math.inf, ["inf", "from 1"]),
        ("true_cfg_scale", -math.inf, ["-inf", "from 1"]),
        ("true_cfg_scale", -4.0, ["-4", "from 1"]),
        ("true_cfg_scale", 0.5, ["0.5", "from 1"]),
        ("true_cfg_scale", 1e30, ["1e+30", "to 100"]),
        ("height", 100, ["100", "multiple of 16", "from 16 to 4096"]),
        ("height", 0, ["0", "multiple of 16", "from 16 to 4096"]),
        ("width", -64, ["-64", "from 16 to 4096"]),
        ("width", 4112, ["4112", "from 16 to 4096"]),
        ("seed", -1, ["-1", f"from 0 to {2**63 - 1}"]),
        ("num_images_per_prompt", 0, ["0", "from 1 to 4"]),
        ("num_images_per_prompt", 5, ["5", "from 1 to 4"]),
        ("output_format", b"gif", ["'gif'", "png, jpeg, webp"]),
        ("response_format", b"url", ["'url'", "bytes, b64"]),
    ],
)
def test_a_bad_field_is_named_with_its_value_and_what_is_allowed(field, value, said):
    with pytest.raises(InvalidRequest) as refusal:
        judge({"prompt": b"x", field: value}, LIMITS)
    message = str(refusal.value)
    assert message.startswith(field)
    for part in said:
        assert part in message


def test_missing_prompt():
    with pytest.raises(InvalidRequest, match="prompt is missing"):
        judge({}, LIMITS)


def test_too_many_pixels_name_both_sides():
    with pytest.raises(InvalidRequest, match=r"2048×1024 = 2097152 pixels; at most 1048576"):
        judge({"prompt": b"x", "height": 2048, "width": 1024}, LIMITS)


def test_the_seed_leaves_room_for_every_image():
    with pytest.raises(InvalidRequest, match="seed is 9223372036854775807"):
        judge({"prompt": b"x", "seed": 2**63 - 1, "num_images_per_prompt": 2}, LIMITS)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("guidance_scale", "true_cfg_scale"),
        ("num_inference_step", "num_inference_steps"),
        ("promt", "prompt"),
        ("negativeprompt", "negative_prompt"),
        ("heigth", "height"),
        ("n", "num_images_per_prompt"),
        ("Seed", "seed"),
    ],
)
def test_an_unknown_parameter_is_refused_with_the_nearest_field(name, nearest):
    with pytest.raises(
        InvalidRequest, match=f"unknown parameter '{name}': did you mean '{nearest}'"
    ):
        judge_parameters([name])


def test_a_field_sent_as_a_parameter_is_not_ignored():
    for name in FIELDS:
        with pytest.raises(InvalidRequest, match="input tensor"):
            judge_parameters([name])


def test_tritons_own_parameters_pass():
    judge_parameters(
        ["timeout", "id", "priority", "triton_enable_empty_final_response", "sequence_id",
         "binary_data_output"]
    )  # fmt: skip


def test_cancel_is_sent_to_the_model_that_reads_it():
    with pytest.raises(InvalidRequest, match="'denoise'"):
        judge_parameters(["cancel"])


def test_limits_from_the_configuration():
    checkpoint = {"size_multiple": 16, "default_height": 512, "default_width": 768}
    names = ("max_steps", "max_images", "min_side", "max_side", "max_pixels")
    parameters = {name: str(getattr(LIMITS, name)) for name in names} | {
        "max_true_cfg_scale": "100"
    }
    assert Limits.from_parameters(parameters, checkpoint) == LIMITS
    for wrong in ("", "0", "many", "-3"):
        with pytest.raises(ValueError, match=f"the parameter max_pixels is '{wrong}'"):
            Limits.from_parameters(parameters | {"max_pixels": wrong}, checkpoint)
