"""The exported engines against the stock modules, loaded the usual way with from_pretrained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from diffusers import AutoencoderKLQwenImage
from tokenizers import Tokenizer
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from export.reference import position_ids

from .conftest import Exported

DROPPED = 34


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def dit_inputs(
    exported: Exported, batch: int, text: int, height: int, width: int, mask: torch.Tensor
) -> tuple[dict[str, np.ndarray], torch.Tensor]:
    """Inputs of the dit engine, the modulation made by its engine, and the timesteps."""
    timestep = torch.rand(batch, 1, generator=torch.Generator().manual_seed(batch))
    block, final = exported.session("modulation").run(None, {"timestep": timestep.numpy()})
    inputs = {
        "hidden_states": random(batch, height * width, 64).numpy(),
        "encoder_hidden_states": random(batch, text, 64, seed=1).numpy(),
        "text_mask": mask.numpy(),
        "position_ids": position_ids(height, width, text).expand(batch, -1, -1).numpy(),
        "block_modulation": block,
        "final_modulation": final,
    }
    return inputs, timestep


@pytest.mark.parametrize(
    ("batch", "height", "width", "lengths"),
    [(1, 4, 4, [5]), (2, 3, 7, [11, 2]), (3, 9, 2, [1, 6, 3]), (1, 16, 11, [40])],
)
def test_modulation_and_dit_equal_the_unsplit_transformer(
    exported: Exported, transformer: Any, batch: int, height: int, width: int, lengths: list[int]
) -> None:
    text = max(lengths)
    mask = torch.arange(text) < torch.tensor(lengths)[:, None]
    inputs, timestep = dit_inputs(exported, batch, text, height, width, mask)
    (result,) = exported.session("dit").run(None, inputs)
    with torch.no_grad():
        (expected,) = transformer(
            hidden_states=torch.from_numpy(inputs["hidden_states"]),
            encoder_hidden_states=torch.from_numpy(inputs["encoder_hidden_states"]),
            encoder_hidden_states_mask=None if mask.all() else mask,
            timestep=timestep[:, 0],
            img_shapes=[[(1, height, width)]] * batch,
            return_dict=False,
        )
    assert np.abs(result - expected.numpy()).max() < 1e-5 * expected.abs().max()


def test_padded_text_tokens_change_nothing(exported: Exported) -> None:
    session = exported.session("dit")
    mask = torch.tensor([[True, True, False, True, False, False]])
    inputs, _ = dit_inputs(exported, 1, 6, 4, 5, mask)
    (expected,) = session.run(None, inputs)
    for filling in (0.0, 1e3, -1e6):
        text = inputs["encoder_hidden_states"].copy()
        text[~mask.numpy()] = filling
        (result,) = session.run(None, inputs | {"encoder_hidden_states": text})
        np.testing.assert_array_equal(result, expected)
    # A longer padding, too: only the order of the sums may change.
    longer = {
        "encoder_hidden_states": np.pad(inputs["encoder_hidden_states"], ((0, 0), (0, 9), (0, 0))),
        "text_mask": np.pad(inputs["text_mask"], ((0, 0), (0, 9))),
        "position_ids": position_ids(4, 5, 15)[None].numpy(),
    }
    (result,) = session.run(None, inputs | longer)
    np.testing.assert_allclose(result, expected, atol=1e-5 * np.abs(expected).max())
    # The mask is what keeps them out.
    (result,) = session.run(None, inputs | {"text_mask": np.ones((1, 6), bool)})
    assert np.abs(result - expected).max() > 1e-3


def test_a_row_without_any_text_is_finite(exported: Exported) -> None:
    inputs, _ = dit_inputs(exported, 2, 5, 3, 3, torch.zeros(2, 5, dtype=torch.bool))
    (result,) = exported.session("dit").run(None, inputs)
    assert np.isfinite(result).all()


def test_rows_of_a_batch_do_not_see_each_other(exported: Exported) -> None:
    session = exported.session("dit")
    mask = torch.arange(7) < torch.tensor([[7], [3]])
    inputs, _ = dit_inputs(exported, 2, 7, 4, 6, mask)
    (together,) = session.run(None, inputs)
    for row in range(2):
        (alone,) = session.run(None, {k: v[row : row + 1] for k, v in inputs.items()})
        np.testing.assert_allclose(together[row], alone[0], atol=1e-5 * np.abs(alone).max())


def test_text_encoder_equals_the_pipelines(exported: Exported, checkpoint: Path) -> None:
    """Prompts of different lengths, right-padded: the valid tokens are the pipeline's."""
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(
        checkpoint / "text_encoder", dtype=torch.float32
    )
    ids = torch.randint(0, 300, (3, DROPPED + 20), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(DROPPED + 20) < torch.tensor([[54], [40], [35]])
    ids[~mask] = exported.checkpoint.tokenizer.pad_token_id
    (result,) = exported.session("text_encoder").run(None, {"input_ids": ids.numpy()})
    with torch.no_grad():
        output = model(input_ids=ids, attention_mask=mask.long(), output_hidden_states=True)
    expected = output.hidden_states[-1][:, DROPPED:]
    valid = mask[:, DROPPED:].numpy()
    assert result.shape == expected.shape
    difference = np.abs(result - expected.numpy())[valid]
    assert difference.max() < 1e-5 * expected.abs().max()


def test_vae_decoder_equals_the_video_decoder(exported: Exported, checkpoint: Path) -> None:
    vae = AutoencoderKLQwenImage.from_pretrained(checkpoint / "vae", dtype=torch.float32)
    session = exported.session("vae_decoder")
    for batch, height, width in [(1, 2, 2), (2, 5, 8)]:
        latents = random(batch, 16, height, width) * 2
        (pixels,) = session.run(None, {"latents": latents.numpy()})
        with torch.no_grad():
            image = vae.decode(latents[:, :, None]).sample[:, :, 0]
        expected = ((image * 0.5 + 0.5).clamp(0, 1) * 255).round().permute(0, 2, 3, 1).numpy()
        assert pixels.dtype == np.uint8
        assert pixels.shape == (batch, 8 * height, 8 * width, 3)
        assert np.abs(pixels - expected).max() <= 1
        assert (pixels != expected).mean() < 0.01
        assert pixels.std() > 10


def test_borders(exported: Exported) -> None:
    entry = exported.entries["dit"]
    assert entry["precision"] == "fp32"
    assert entry["artifact"] == "model.onnx"
    assert entry["files"] == ["model.onnx", "model.onnx.data"]
    assert entry["inputs"]["text_mask"] == {"dtype": "BOOL", "shape": [-1, -1]}
    assert entry["inputs"]["position_ids"] == {"dtype": "INT32", "shape": [-1, -1, 3]}
    assert entry["inputs"]["block_modulation"] == {"dtype": "FP32", "shape": [-1, 12, 2, 192]}
    assert entry["outputs"] == {"noise_pred": {"dtype": "FP32", "shape": [-1, -1, 64]}}
    for name, entry in exported.entries.items():
        assert entry["verified"]["mode"] == "whole"
        assert entry["verified"]["max_abs_error"] < (2 if name == "vae_decoder" else 1e-4)
        batches = {next(iter(case.values()))[0] for case in entry["verified"]["shapes"]}
        assert {1, 2} <= batches
    session = exported.session("vae_decoder")
    assert session.get_outputs()[0].shape == ["batch", "pixel_height", "pixel_width", 3]


def test_graphs_hold_no_weights(exported: Exported) -> None:
    """Weights are external, in order, aligned, and exactly the checkpoint's."""
    for engine in exported.entries:
        model = onnx.load(exported.folder / engine / "model.onnx", load_external_data=False)
        external = [t for t in model.graph.initializer if t.external_data]
        inner = sum(len(t.raw_data) for t in model.graph.initializer)
        assert len(external) > 10
        assert inner < 10_000
        places = [{e.key: e.value for e in t.external_data} for t in external]
        assert {place["location"] for place in places} == {"model.onnx.data"}
        assert all(int(place["offset"]) % 64 == 0 for place in places)
    data = np.memmap(exported.folder / "dit" / "model.onnx.data", np.uint8, mode="r")
    model = onnx.load(exported.folder / "dit" / "model.onnx", load_external_data=False)
    stored = exported.checkpoint.tensors["transformer"]
    for tensor in model.graph.initializer:
        if tensor.external_data:
            place = {e.key: e.value for e in tensor.external_data}
            start, length = int(place["offset"]), int(place["length"])
            values = data[start : start + length].view(np.float32)
            np.testing.assert_array_equal(values, stored[tensor.name].read().ravel())
    names = {t.name for t in model.graph.initializer}
    assert not any("_mod." in name or name.startswith("time_text") for name in names)


def test_onnx_runtime_folds_the_transposes_of_the_weights(
    exported: Exported, tmp_path: Path
) -> None:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    ort.InferenceSession(exported.folder / "dit" / "model.onnx", options)
    model = onnx.load(tmp_path / "optimized.onnx", load_external_data=False)
    weights = {tensor.name for tensor in model.graph.initializer}
    kinds = [node.op_type for node in model.graph.node if set(node.input) & weights]
    assert "Transpose" not in kinds
    assert [node.op_type for node in model.graph.node].count("Attention") == 12


def test_tokenizer(exported: Exported, checkpoint: Path) -> None:
    tokenizer = Tokenizer.from_file(str(exported.folder / "tokenizer.json"))
    stock = Qwen2Tokenizer.from_pretrained(checkpoint / "tokenizer")
    for text in ("a red cat", "一只猫 🐱", "", "{} <|im_end|> <|vision_start|>", "word " * 3000):
        assert tokenizer.encode(text).ids == stock(text).input_ids
    assert tokenizer.truncation is None
    assert tokenizer.padding is None


def test_checkpoint_json(exported: Exported) -> None:
    written = json.loads((exported.folder / "checkpoint.json").read_text(encoding="utf-8"))
    assert written == exported.checkpoint.describe()
    assert written["format"] == 1
    assert written["pipeline_class"] == "QwenImagePipeline"
    assert written["prompt_template"].startswith("<|im_start|>system\nDescribe the image")
    assert written["prompt_template"].count("{}") == 1
    assert written["prompt_template_dropped_tokens"] == DROPPED
    assert written["max_prompt_tokens"] == 1024
    assert (written["default_height"], written["default_width"]) == (256, 256)
    assert written["size_multiple"] == 16
    assert written["text_encoder"] == {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": 704,
    }
    assert written["transformer"] == {
        "num_layers": 12,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "joint_attention_dim": 64,
        "in_channels": 64,
        "out_channels": 16,
        "patch_size": 2,
        "axes_dims_rope": [4, 6, 6],
    }
    assert written["vae"]["z_dim"] == len(written["vae"]["latents_std"]) == 16
    assert written["vae"]["scale_factor"] == 8
    assert written["scheduler"]["shift_terminal"] == 0.02
    assert set(written["components"]) == {
        "tokenizer",
        "text_encoder",
        "transformer",
        "vae",
        "scheduler",
    }


def test_progress(exported: Exported) -> None:
    stages = list(dict.fromkeys(what for what, _, _ in exported.progress))
    assert stages[6:9] == ["dit: trace", "dit: weights", "dit: verify"]
    for stage in stages:
        steps = [(done, total) for what, done, total in exported.progress if what == stage]
        assert [done for done, _ in steps] == list(range(steps[0][1] + 1))
