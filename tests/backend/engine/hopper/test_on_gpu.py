"""What only a GPU computes, against the same on the CPU: `pytest tests/backend/engine/hopper`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from export.checkpoint import Checkpoint
from export.engines import engines
from export.export import entry
from export.packed import PACKED, write_packed
from export.progress import ignore_progress
from export.recipe import load_recipe
from hopper import ops, reference
from hopper.attention import Samples, attend, flash_attention
from hopper.dit import Dit
from hopper.replay import Replayed
from hopper.weights import HOST, load
from runtimes.safetensors import Runtime
from tests.make_checkpoint import cached_checkpoint

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

CONFIG = {"num_layers": 3, "attention_head_dim": 128, "axes_dims_rope": (16, 56, 56)}
WIDTH, TEXT_WIDTH = 256, 96


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(7)


def normal(*shape: int, spread: float = 1.0) -> Tensor:
    return (spread * torch.randn(*shape, device="cuda")).bfloat16()


def close(result: Tensor, expected: Tensor, tolerance: float) -> None:
    wide = expected.float().to(result.device)
    error = float((result.float() - wide).norm() / wide.norm())
    assert error < tolerance, f"relative error {error}"


@pytest.mark.parametrize("rows", [1, 16, 32, 37, 48, 64, 80, 300])
@pytest.mark.parametrize(
    ("width", "out"),
    # Small odd ones, and a block's at full size.
    [(32, 16), (160, 48), (3072, 9216), (3072, 3072), (3072, 12288), (12288, 3072)],
)
@pytest.mark.parametrize("biased", [False, True])
def test_scaled_mm(rows: int, width: int, out: int, biased: bool) -> None:
    x, x_scale = ops.quantize_rows(normal(rows, width))
    weight, scale = ops.quantize_rows(normal(out, width, spread=0.02))
    given = (x, x_scale, weight, scale, normal(out) if biased else None)
    results = [torch.empty(rows, out, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    ops.scaled_mm(*given, results[0])
    reference.scaled_mm(*given, results[1])
    close(results[0], results[1], 0.01)


@pytest.mark.parametrize("lengths", [(70, 70), (131, 5, 70), (300,)])
@pytest.mark.parametrize("kind", ["cudnn", "flash_attention", "flash_attention_e4m3"])
def test_attend(lengths: tuple[int, ...], kind: str) -> None:
    if kind != "cudnn" and flash_attention() is None:
        pytest.skip("needs fa3-fwd")
    rows = sum(lengths) + 3  # what lies behind the last sample does not count
    q, k, v = (normal(rows, 3, 128) for _ in range(3))
    ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    on_cpu = (x.float().cpu() for x in (q, k, v))
    expected = attend(*on_cpu, Samples(ends.cpu(), 0, lengths))[: sum(lengths)]
    descale, tolerance = None, 0.01
    if kind == "flash_attention_e4m3":
        descale, tolerance = torch.tensor([0.25], device="cuda"), 0.1
        q, k, v = (x.to(torch.float8_e4m3fn) for x in (q, k, v / descale))
    samples = Samples(ends, 400, lengths if kind == "cudnn" else ())
    found = attend(q, k, v, samples, descale)
    close(found[: sum(lengths)], expected, tolerance)


def test_a_replayed_pass_computes_what_it_recorded() -> None:
    calls = []

    def forward(x: Tensor, y: Tensor, factor: int) -> Tensor:
        calls.append(factor)
        return x @ y * factor

    replayed = Replayed(forward)
    for factor in (2, 3):
        for _ in range(4):
            x, y = normal(5, 16), normal(16, 3)
            close(replayed(x, y, rest=(factor,)), x @ y * factor, 1e-6)
    assert calls == [2, 2, 3, 3]  # once at first, once to record


def test_a_first_call_that_failed_is_made_again_before_anything_is_recorded() -> None:
    recorded = []

    def forward(x: Tensor) -> Tensor:
        recorded.append(torch.cuda.is_current_stream_capturing())
        if len(recorded) == 1:
            raise RuntimeError("out of memory")
        return x * 2

    replayed, x = Replayed(forward), normal(5, 16)
    with pytest.raises(RuntimeError):
        replayed(x)
    for _ in range(3):
        close(replayed(x), x * 2, 1e-6)
    assert recorded == [False, False, True]


def test_recordings_of_different_sizes_share_the_memory_of_their_inputs() -> None:
    replayed = Replayed(lambda x: x * 2)
    for _ in range(4):
        for rows in (5, 3, 90, 5):
            x = normal(rows, 16)
            close(replayed(x), x * 2, 1e-6)


def small_weights(fp8: bool) -> dict[str, Tensor]:
    shapes = {"img_in": (WIDTH, 64), "txt_in": (WIDTH, TEXT_WIDTH), "proj_out": (64, WIDTH)}
    weights = {"txt_norm.weight": 1 + normal(TEXT_WIDTH, spread=0.1)}
    for i in range(CONFIG["num_layers"]):
        weights[f"transformer_blocks.{i}.norms.weight"] = 1 + normal(512, spread=0.1)
        for stream in ("text", "image"):
            for kind, rows, columns in (
                ("qkv", 3, 1),
                ("out", 1, 1),
                ("mlp_in", 4, 1),
                ("mlp_out", 1, 4),
            ):
                name = f"transformer_blocks.{i}.{stream}.{kind}"
                shapes[name] = (rows * WIDTH, columns * WIDTH)
    for name, shape in shapes.items():
        weight = normal(*shape, spread=shape[1] ** -0.5)
        weights[f"{name}.bias"] = normal(shape[0], spread=0.1)
        weights[f"{name}.weight"] = weight
        if fp8 and "blocks" in name:
            weights[f"{name}.weight"], weights[f"{name}.scale"] = ops.quantize_rows(weight)
    return weights


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("fp8_attention", [False, True])
@pytest.mark.parametrize("short", [4, 1])  # with it the padding's rows are computed, or are not
def test_dit(fp8: bool, fp8_attention: bool, short: int) -> None:
    weights = small_weights(fp8)
    if fp8_attention:
        if flash_attention() is None:
            pytest.skip("needs fa3-fwd")
        for i in range(CONFIG["num_layers"]):
            largest = torch.tensor([8.0], device="cuda")
            weights[f"transformer_blocks.{i}.attention.largest_value"] = largest
    text, image, counts = 13, 77, torch.tensor([[13], [short]])
    torch.full((10**8,), torch.nan, device="cuda")  # what memory holds that is not written
    given = (
        normal(2, image, 64),
        normal(2, text, TEXT_WIDTH),
        torch.arange(text) < counts,
        torch.randint(-40, 40, (2, text + image, 3), device="cuda", dtype=torch.int32),
        normal(2, CONFIG["num_layers"], 2, 6 * WIDTH, spread=0.3),
        normal(2, 2 * WIDTH, spread=0.3),
    )
    engine = Dit(weights, CONFIG)
    on_cpu = Dit({name: value.cpu() for name, value in weights.items()}, CONFIG)
    expected = on_cpu(*(value.cpu() for value in given))
    similar = functional.cosine_similarity
    for _ in range(3):  # computed, recorded, replayed
        found = engine(*given)
        assert similar(found.float().cpu().flatten(), expected.float().flatten(), dim=0) > 0.995


def test_the_text_encoder_reads_its_embeddings_on_the_host(tmp_path: Path) -> None:
    checkpoint = Checkpoint(cached_checkpoint())
    engine = next(each for each in engines(checkpoint) if each.name == "text_encoder")
    recipe, borders = load_recipe("bf16")[engine.name], entry(engine, {})
    write_packed(engine, checkpoint, recipe, borders, None, tmp_path, ignore_progress)
    weights, _ = load(tmp_path / PACKED, torch.device("cuda"))
    assert {name for name, tensor in weights.items() if not tensor.is_cuda} == HOST
    ids = torch.arange(40, 90)[None]
    found, expected = (
        Runtime(tmp_path / PACKED, {"device": device}).run({"input_ids": ids})["hidden_states"]
        for device in ("cuda", "cpu")
    )
    assert found.is_cuda
    similar = functional.cosine_similarity
    assert similar(found.float().cpu().flatten(), expected.float().flatten(), dim=0) > 0.999
