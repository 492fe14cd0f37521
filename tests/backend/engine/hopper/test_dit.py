"""The denoiser on the CPU, where its parts may be arranged in more ways than a recipe does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hopper.dit
from export.checkpoint import Checkpoint
from export.engines import engines
from export.export import entry
from export.packed import PACKED, write_packed
from export.progress import ignore_progress
from export.recipe import EngineRecipe
from export.reference import DitReference
from hopper.attention import join
from hopper.dit import TEXT_MULTIPLE, TEXT_PARTS, Dit, rows_for
from hopper.weights import load
from tests.make_checkpoint import cached_checkpoint

NAMES = (
    "hidden_states",
    "encoder_hidden_states",
    "text_mask",
    "position_ids",
    "block_modulation",
    "final_modulation",
)


@pytest.fixture(scope="module")
def reference() -> DitReference:
    return DitReference(Checkpoint(cached_checkpoint()))


def engine(folder: Path, formats: dict[str, list[str]], largest: float | None = None) -> Dit:
    checkpoint = Checkpoint(cached_checkpoint())
    dit = next(engine for engine in engines(checkpoint) if engine.name == "dit")
    recipe = EngineRecipe("test", "test", "bf16", formats)
    write_packed(dit, checkpoint, recipe, entry(dit, {}), None, folder, ignore_progress)
    weights, description = load(folder / PACKED, torch.device("cpu"))
    if largest is not None:
        for i in range(dit.blocks):
            weights[f"transformer_blocks.{i}.attention.largest_value"] = torch.tensor([largest])
    return Dit(weights, description["config"])


def errors(dit: Dit, reference: DitReference) -> list[float]:
    with torch.no_grad():
        expected = reference.whole()
        results = []
        for case, value in zip(reference.cases, expected, strict=True):
            given = [
                case[name].bfloat16() if case[name].is_floating_point() else case[name]
                for name in NAMES
            ]
            wide = value["noise_pred"]
            results.append(float((dit(*given).float() - wide).norm() / wide.norm()))
    return results


def test_streams_of_different_formats(reference: DitReference, tmp_path: Path) -> None:
    text = ["*.txt_mlp.*", "*.add_*", "*.to_add_out"]
    image = ["*.img_mlp.*", "*.to_q", "*.to_k", "*.to_v", "*.to_out.0"]
    kept = {"keep": ["img_in", "txt_in", "proj_out"]}
    for fp8, keep in ((text, image), (image, text)):
        formats = {"fp8": fp8, "keep": keep + kept["keep"]}
        assert max(errors(engine(tmp_path, formats), reference)) < 0.12


def test_attention_in_e4m3(reference: DitReference, tmp_path: Path) -> None:
    assert max(errors(engine(tmp_path, {}, largest=8.0), reference)) < 0.12


def test_places_of_rows() -> None:
    mask = torch.tensor([[True, False, True], [True, True, True], [False, False, False]])
    for text_rows in (9, 6, 5):
        rows, valid, places, ends = join(mask, 2, text_rows)  # two image tokens each
        assert rows.tolist() == [0, 2, 3, 4, 5, 1, 6, 7, 8][:text_rows]
        assert valid.tolist() == [True] * 5 + [False] * (text_rows - 5)
        text, image = places.split([text_rows, 6])
        assert text.tolist() == [0, 1, 4, 5, 6, 11, 12, 13, 14][:text_rows]
        assert image.tolist() == [2, 3, 7, 8, 9, 10]
        assert ends.tolist() == [0, 4, 9, 11]


def test_rows_of_text() -> None:
    found = {valid: rows_for(valid, 256) for valid in (0, 1, 32, 33, 134, 256)}
    assert found == {0: 32, 1: 32, 32: 32, 33: 64, 134: 160, 256: 256}
    assert rows_for(0, 0) == 0
    numbers = {rows_for(valid, 16 * 1024) for valid in range(16 * 1024 + 1)}
    assert len(numbers) <= TEXT_PARTS and all(number % TEXT_MULTIPLE == 0 for number in numbers)
    for most in range(16, 4096, 16):
        assert all(valid <= rows_for(valid, most) <= most for valid in range(1, most + 1))


def test_most_padding_is_not_computed(
    reference: DitReference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight texts, one of full length: as alone, and with a fraction of the rows."""
    dit = engine(tmp_path, {})
    case = {name: reference.cases[0][name][:1].repeat_interleave(8, 0) for name in NAMES}
    tokens = case["text_mask"].shape[1]
    counts = torch.tensor([3, tokens, 1, 5, 2, 1, 4, 2])
    case["text_mask"] = torch.arange(tokens) < counts[:, None]
    given = [
        value.bfloat16() if value.is_floating_point() else value
        for value in (case[name] for name in NAMES)
    ]
    given[0] = torch.randn(given[0].shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    computed = []
    join_rows = hopper.dit.join

    def counted(mask: torch.Tensor, image_tokens: int, text_rows: int) -> tuple[torch.Tensor, ...]:
        computed.append(text_rows)
        return join_rows(mask, image_tokens, text_rows)

    monkeypatch.setattr(hopper.dit, "join", counted)
    together = dit(*given)
    assert computed[0] < 8 * tokens
    for row in range(8):
        alone = dit(*(value[row : row + 1] for value in given))
        distance = (together[row] - alone[0]).float().norm() / alone.float().norm()
        assert distance < 0.01, row


def test_padding_is_not_attended_to(reference: DitReference, tmp_path: Path) -> None:
    for largest in (None, 8.0):
        dit = engine(tmp_path, {}, largest)
        case = dict(reference.cases[0])
        given = [
            case[name].bfloat16() if case[name].is_floating_point() else case[name]
            for name in NAMES
        ]
        before = dit(*given)
        given[1] = torch.where(case["text_mask"][..., None], given[1], torch.nan)
        assert not case["text_mask"].all()
        assert torch.equal(dit(*given), before)
