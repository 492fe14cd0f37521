"""The roofline model against what was measured on an H200."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench.common import RESULTS
from bench.roofline import (
    CARDS,
    H200,
    ROOF,
    dit_work,
    memory_gb,
    modulation_work,
    text_encoder_work,
    vae_decoder_work,
)

# The model's own, as its card names them.
NATIVE = ("1328×1328 guided", "1664×928 guided", "1472×1104 guided", "1584×1056 guided")
SIZES = ("1024² guided", "512² guided, 8 requests", "1664×928 guided", "1024²")


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    parts: dict[str, Any] = json.loads((RESULTS / "hopper.json").read_text())["parts"]
    return parts


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("fp8_attention", [False, True])
@pytest.mark.parametrize(("part", "bf16_blocks"), [("dit", 4), ("dit_all_fp8", 0)])
def test_step(
    measured: dict[str, Any], part: str, bf16_blocks: int, size: str, fp8_attention: bool
) -> None:
    found = measured[part]
    step = (found["fp8_attention"] if fp8_attention else found)["steps"][size]
    shape = step["batch"], step["image_tokens"], step["text_tokens"]
    computed = dit_work(*shape, "fp8", fp8_attention, bf16_blocks).seconds(H200) * 1e3
    assert computed == pytest.approx(step["ms"], rel=0.15)


@pytest.mark.parametrize("size", NATIVE)
def test_no_size_of_the_model_s_own_is_off_what_its_tokens_predict(
    measured: dict[str, Any], size: str
) -> None:
    steps = measured["dit"]["fp8_attention"]["steps"]
    usual = steps["1024² guided"]["ratio_to_roofline"]
    assert steps[size]["ratio_to_roofline"] == pytest.approx(usual, rel=0.15)


def test_the_stock_model_in_bf16(measured: dict[str, Any]) -> None:
    """Compiled blocks come near the model; they do more element-wise passes."""
    computed = dit_work(2, 4096, 128, "bf16", False).seconds(H200) * 1e3
    assert computed < measured["baselines"]["diffusers_compiled_blocks_ms"] < 1.3 * computed


def test_modulation_of_a_schedule(measured: dict[str, Any]) -> None:
    computed = modulation_work(50).seconds(H200) * 1e3
    assert computed == pytest.approx(measured["dit_all_fp8"]["modulation_of_50_steps_ms"], rel=0.15)


def test_nothing_is_faster_than_the_roofline(measured: dict[str, Any]) -> None:
    parts = measured["dit_all_fp8"], measured["dit_all_fp8"]["fp8_attention"]
    assert all(step["ratio_to_roofline"] > 1 for part in parts for step in part["steps"].values())
    prompt = text_encoder_work(128, "bf16").seconds(ROOF) * 1e3
    assert prompt < measured["text_encoder"]["bf16, 128 tokens"]["ms"]
    picture = vae_decoder_work(1024**2).seconds(ROOF) * 1e3
    assert picture < measured["vae_decoder"]["1024²"]["ms"]


def test_memory_of_the_published_model() -> None:
    """Published: 20.4 B parameters of the DiT, 7.1 B of the language model, two bytes each."""
    assert memory_gb("bf16", 0) == pytest.approx(2 * (20.4 + 7.1), rel=0.02)
    assert memory_gb("fp8", 0) < 36


def test_faster_cards_take_less_time() -> None:
    seconds = {card.name: dit_work(2, 4096, 128, "fp8", True).seconds(card) for card in CARDS}
    assert seconds["B200"] < seconds["H200"] < seconds["H100 SXM"]
    assert seconds["H100 SXM"] < seconds["RTX PRO 6000 Blackwell"] < seconds["RTX 4090"]
