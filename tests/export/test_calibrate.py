"""Calibration against ranges found by other means; resuming; what is refused."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline
from diffusers.models.transformers import transformer_qwenimage
from safetensors.numpy import load_file, save_file

from export import Checkpoint, ExportError
from export import activations as module
from export.activations import Prompt, calibrate, check_prompts, read_prompts
from export.calibrate import PROMPTS, main
from export.calibration import (
    FORMAT,
    METADATA,
    Calibration,
    load_calibration,
    save_calibration,
)
from export.engines import engines
from export.write import plan_weights
from tests.conftest import ROOT

STEPS = 2
TEXTS = ("a red cat", "一只猫在天空，山和水", 'a sign that reads "42"')


@pytest.fixture(scope="module")
def opened(checkpoint: Path) -> Checkpoint:
    return Checkpoint(checkpoint)


@pytest.fixture(scope="module")
def fingerprint(opened: Checkpoint) -> str:
    return str(opened.describe()["fingerprint"])


@pytest.fixture(scope="module")
def prompts(opened: Checkpoint) -> list[Prompt]:
    return check_prompts([Prompt(text, seed) for seed, text in enumerate(TEXTS)], opened, 32, 32)


@pytest.fixture(scope="module")
def calibrated(
    opened: Checkpoint, prompts: list[Prompt], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """An uninterrupted run."""
    out = tmp_path_factory.mktemp("calibration") / "calibration.safetensors"
    calibrate(opened, out, prompts, STEPS)
    return out


@pytest.fixture(scope="module")
def calibration(calibrated: Path, fingerprint: str) -> Calibration:
    return load_calibration(calibrated, fingerprint)


# ---------------------------------------------------------------------- the ranges

# Entry → the module whose input it is, and the axis of its channels.
WATCHED: dict[str, tuple[str, int]] = {
    "dit/img_in": ("transformer.img_in", -1),
    "dit/txt_in": ("transformer.txt_in", -1),
    "dit/transformer_blocks.0.attn.to_q": ("transformer.transformer_blocks.0.attn.to_q", -1),
    "dit/transformer_blocks.3.img_mlp.net.2": ("transformer.transformer_blocks.3.img_mlp.net.2", 2),
    "dit/transformer_blocks.11.attn.to_add_out": (
        "transformer.transformer_blocks.11.attn.to_add_out",
        -1,
    ),
    "dit/proj_out": ("transformer.proj_out", -1),
    "text_encoder/layers.1.mlp.down_proj": (
        "text_encoder.model.language_model.layers.1.mlp.down_proj",
        -1,
    ),
    "vae_decoder/post_quant_conv": ("vae.post_quant_conv", 1),
    "vae_decoder/decoder.mid_block.resnets.0.conv1": ("vae.decoder.mid_block.resnets.0.conv1", 1),
    "vae_decoder/decoder.mid_block.attentions.0.proj": (
        "vae.decoder.mid_block.attentions.0.proj",
        1,
    ),
    "vae_decoder/decoder.up_blocks.0.upsamplers.0.resample.1": (
        "vae.decoder.up_blocks.0.upsamplers.0.resample.1",
        1,
    ),
}


@contextmanager
def seen(pipeline: Any) -> Iterator[dict[str, list[np.ndarray]]]:
    """Every input of the watched layers, [rows, channels], and every call of attention, which the
    transformer's module makes block by block."""
    inputs: dict[str, list[np.ndarray]] = {}

    def keep(name: str, axis: int) -> Callable[..., None]:
        def hook(module: Any, args: Any, output: Any) -> None:
            rows = np.moveaxis(args[0].numpy(), axis, -1)
            inputs.setdefault(name, []).append(rows.reshape(-1, rows.shape[-1]))

        return hook

    handles = [
        pipeline.components[path.split(".")[0]]
        .get_submodule(path.partition(".")[2])
        .register_forward_hook(keep(name, axis))
        for name, (path, axis) in WATCHED.items()
    ]
    attention, calls = transformer_qwenimage.dispatch_attention_fn, 0

    def dispatch(query: Any, key: Any, value: Any, **options: Any) -> Any:
        nonlocal calls
        block = calls % len(pipeline.transformer.transformer_blocks)
        calls += 1
        for part, tensor in (("query", query), ("key", key), ("value", value)):
            rows = tensor.flatten(2)[0].numpy()  # [tokens, heads · head size]
            inputs.setdefault(f"dit/transformer_blocks.{block}.attn.{part}", []).append(rows)
        return attention(query, key, value, **options)

    transformer_qwenimage.dispatch_attention_fn = dispatch
    try:
        yield inputs
    finally:
        transformer_qwenimage.dispatch_attention_fn = attention
        for handle in handles:
            handle.remove()


def test_the_ranges_are_those_of_the_pipeline(checkpoint: Path, calibration: Calibration) -> None:
    pipeline = QwenImagePipeline.from_pretrained(checkpoint, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    with seen(pipeline) as inputs:
        for seed, text in enumerate(TEXTS):
            pipeline(
                text,
                negative_prompt=" ",
                true_cfg_scale=4.0,
                height=32,
                width=32,
                num_inference_steps=STEPS,
                generator=torch.Generator().manual_seed(seed),
                max_sequence_length=1024,
            )
    assert len(inputs) == len(WATCHED) + 3 * 12
    # Two predictions a step, one picture a prompt, two encoded texts a prompt.
    runs = {"dit": 2 * STEPS, "text_encoder": 2, "vae_decoder": 1}
    for name, arrays in inputs.items():
        assert len(arrays) == len(TEXTS) * runs[name.split("/")[0]]
        expected = np.abs(np.concatenate(arrays)).max(axis=0)
        np.testing.assert_array_equal(calibration.channels(name), expected, err_msg=name)
        assert calibration.amax(name) == expected.max() > 0
        # Every prompt counts as much as another, however many tokens it has.
        prompts = np.array_split(np.arange(len(arrays)), len(TEXTS))
        means = [(np.concatenate([arrays[i] for i in part]) ** 2).mean(axis=0) for part in prompts]
        squares = calibration.squares(name)
        np.testing.assert_allclose(squares, np.mean(means, axis=0), rtol=1e-4, err_msg=name)


def test_every_matrix_and_convolution_of_the_engines_has_a_range(
    opened: Checkpoint, calibration: Calibration
) -> None:
    expected: dict[str, int] = {}
    for engine in engines(opened):
        if engine.name == "modulation":
            continue
        for name, weight in plan_weights(engine, opened).items():
            if len(weight.shape) > 1 and not name.endswith((".gamma", "embed_tokens.weight")):
                expected[f"{engine.name}/{name.removesuffix('.weight')}"] = weight.shape[1]
    attention = {
        f"dit/transformer_blocks.{block}.attn.{part}": opened.transformer.inner_dim
        for block in range(12)
        for part in ("query", "key", "value")
    }
    found = {name: len(calibration.channels(name)) for name in calibration.names}
    assert found == expected | attention


def test_amax_is_the_largest_of_the_channels(calibrated: Path, calibration: Calibration) -> None:
    tensors = load_file(calibrated)
    assert len(tensors) == 3 * len(calibration.names)
    assert {str(value.dtype) for value in tensors.values()} == {"float32"}
    for name in calibration.names:
        assert tensors[f"{name}/amax"].shape == ()
        assert calibration.amax(name) == calibration.channels(name).max()


def test_a_layer_without_a_range_is_named(calibration: Calibration) -> None:
    name = "dit/transformer_blocks.0.img_mod.1"
    for read in (calibration.amax, calibration.channels, calibration.squares):
        with pytest.raises(ExportError, match=rf"has no range of {name}$"):
            read(name)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_a_range_that_is_not_finite_is_named(
    opened: Checkpoint, prompts: list[Prompt], tmp_path: Path
) -> None:
    out = tmp_path / "out.safetensors"
    # This scheduler divides by zero when there is one step.
    with pytest.raises(ExportError, match=r"^prompt 1: dit/\S+ is not finite in float32$"):
        calibrate(opened, out, prompts, steps=1)
    assert not out.exists()


def test_ranges_of_bf16_are_kept_exactly(
    opened: Checkpoint,
    prompts: list[Prompt],
    monkeypatch: pytest.MonkeyPatch,
    calibration: Calibration,
    tmp_path: Path,
) -> None:
    load = module.load_pipeline  # as for CUDA, but on a CPU
    monkeypatch.setattr(module, "load_pipeline", lambda c, dtype, *_: load(c, dtype, "cpu", False))
    found = calibrate(opened, tmp_path / "out", prompts[:1], STEPS, device="cuda")
    assert found.settings["dtype"] == "bfloat16"
    assert found.names == calibration.names
    for name in found.names:
        values = torch.from_numpy(found.channels(name))
        assert values.dtype == torch.float32
        assert torch.equal(values, values.bfloat16().float())


# ---------------------------------------------------------------------- resuming


class Stop(Exception):
    pass


def stop_after(steps: int) -> Callable[[str, int, int], None]:
    def progress(what: str, done: int, total: int) -> None:
        if what == "calibrate" and done == steps:
            raise Stop

    return progress


def test_an_interrupted_run_goes_on_where_it_stopped(
    opened: Checkpoint, prompts: list[Prompt], calibrated: Path, fingerprint: str, tmp_path: Path
) -> None:
    out = tmp_path / "new" / "calibration.safetensors"
    with pytest.raises(Stop):
        calibrate(opened, out, prompts, STEPS, progress=stop_after(STEPS + 1))
    assert [file.name for file in out.parent.iterdir()] == [out.name]
    with pytest.raises(ExportError, match="is unfinished, with 1 of 3 prompts: the command that"):
        load_calibration(out, fingerprint)

    steps: list[tuple[str, int, int]] = []
    calibrate(opened, out, prompts, STEPS, progress=lambda *step: steps.append(step))
    assert steps[2:] == [("calibrate", done, 6) for done in (2, 3, 4, 5, 6)]
    assert out.read_bytes() == calibrated.read_bytes()

    steps.clear()
    again = calibrate(opened, out, prompts, STEPS, progress=lambda *step: steps.append(step))
    assert steps == []
    assert again.settings["done"] == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"steps": 20}, "steps = 20, which is now 2"),
        ({"dtype": "bfloat16"}, "dtype = 'bfloat16', which is now 'float32'"),
        ({"prompts": "0" * 64}, "other prompts, sizes or seeds"),
        ({"checkpoint": "f00d" * 16}, "another checkpoint (f00df00df00d…, now "),
        ({"versions": {}}, "versions = {}, which is now {'torch'"),
    ],
)
def test_a_run_of_something_else_is_not_gone_on_with(
    opened: Checkpoint,
    prompts: list[Prompt],
    calibration: Calibration,
    change: dict[str, Any],
    words: str,
    tmp_path: Path,
) -> None:
    out = tmp_path / "calibration.safetensors"
    save_calibration(out, calibration.settings | change, {}, {})
    before = out.read_bytes()
    with pytest.raises(ExportError) as caught:
        calibrate(opened, out, prompts, STEPS)
    assert f"{out} was begun with {words}" in str(caught.value)
    assert str(caught.value).endswith(": remove it to start anew")
    assert out.read_bytes() == before


def test_prompts_sizes_and_seeds_make_another_run(
    opened: Checkpoint, prompts: list[Prompt], calibrated: Path
) -> None:
    first, *others = prompts
    for changed in (
        Prompt("a cat", first.seed, 32, 32),
        Prompt(first.text, 7, 32, 32),
        Prompt(first.text, first.seed, 48, 32),
    ):
        with pytest.raises(ExportError, match="was begun with other prompts, sizes or seeds"):
            calibrate(opened, calibrated, [changed, *others], STEPS)


# ---------------------------------------------------------------------- refused files


def test_a_calibration_of_another_checkpoint_is_refused(calibrated: Path, fingerprint: str) -> None:
    with pytest.raises(ExportError) as caught:
        load_calibration(calibrated, "f00d" * 16)
    assert str(caught.value) == (
        f"{calibrated} was made from another checkpoint: from {fingerprint[:12]}…, but this one is "
        "f00df00df00d…"
    )


def test_another_format_is_refused(
    calibration: Calibration, fingerprint: str, tmp_path: Path
) -> None:
    out = tmp_path / "calibration.safetensors"
    save_calibration(out, calibration.settings | {"format": 1}, {}, {})
    with pytest.raises(ExportError, match="has the format 1, but only 2 is read"):
        load_calibration(out, fingerprint)


def test_what_is_no_calibration_is_refused(
    opened: Checkpoint, prompts: list[Prompt], calibrated: Path, tmp_path: Path
) -> None:
    whole = calibrated.read_bytes()
    damaged = {
        "cut off": whole[:-5],
        "headless": whole[:20],
        "empty": b"",
        "text": b"version https://git-lfs.github.com/spec/v1\n",
    }
    for name, data in damaged.items():
        (tmp_path / name).write_bytes(data)
    save_file({"a": np.zeros(3, np.float32)}, tmp_path / "weights", metadata={"format": "pt"})
    (tmp_path / "folder").mkdir()
    for path in sorted(tmp_path.iterdir()):
        for read in (
            lambda path: load_calibration(path, "0" * 64),
            lambda path: calibrate(opened, path, prompts, STEPS),
        ):
            with pytest.raises(ExportError) as caught:
                read(path)
            assert str(caught.value).startswith(f"{path} is no calibration file")
            assert "\n" not in str(caught.value)
    for name, data in damaged.items():
        assert (tmp_path / name).read_bytes() == data
    with pytest.raises(ExportError, match=r"missing is missing: python -m export\.calibrate makes"):
        load_calibration(tmp_path / "missing", "0" * 64)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"checkpoint": None}, "its metadata name the checkpoint None, but it must be a fingerpr"),
        ({"checkpoint": 3}, "its metadata name the checkpoint 3, but it must be a fingerprint"),
        ({"done": None}, "its metadata have done = None of total = 3 prompts, but"),
        ({"done": "1"}, "its metadata have done = '1' of total = 3 prompts, but"),
        ({"done": 4}, "its metadata have done = 4 of total = 3 prompts, but"),
        ({"done": 0, "total": 0}, "its metadata have done = 0 of total = 0 prompts, but"),
        ({"deep": "[" * 100_000 + "]" * 100_000}, "maximum recursion depth exceeded"),
    ],
)
def test_edited_metadata_are_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    settings = {"format": FORMAT, "checkpoint": "0" * 64, "done": 3, "total": 3} | change
    text = json.dumps({name: value for name, value in settings.items() if value is not None})
    if "deep" in change:
        text = text.replace(json.dumps(change["deep"]), change["deep"])
    path = tmp_path / "ranges"
    save_file({}, path, metadata={METADATA: text})
    with pytest.raises(ExportError) as caught:
        load_calibration(path, "0" * 64)
    assert str(caught.value).startswith(f"{path} is no calibration file, or a damaged one: {said}")


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("amax", np.zeros(1, np.float32)),
        ("channels", np.zeros((), np.float32)),
        ("squares", np.zeros(3, np.float16)),
        ("squares", np.full(3, np.nan, np.float32)),
        ("amax", np.array(-1, np.float32)),
    ],
)
def test_edited_ranges_are_refused(kind: str, value: np.ndarray, tmp_path: Path) -> None:
    settings = {"format": FORMAT, "checkpoint": "0" * 64, "done": 3, "total": 3}
    path = tmp_path / "ranges"
    save_file({f"dit/img_in/{kind}": value}, path, metadata={METADATA: json.dumps(settings)})
    with pytest.raises(ExportError, match=f"dit/img_in/{kind} must be finite FP32, one "):
        load_calibration(path, "0" * 64)


# ---------------------------------------------------------------------- prompts


def test_the_shipped_prompts() -> None:
    prompts = read_prompts(PROMPTS)
    assert len(PROMPTS.read_text(encoding="utf-8").splitlines()) == 64
    assert len({prompt.text for prompt in prompts}) == 64
    assert [prompt.seed for prompt in prompts] == list(range(64))
    chinese = [prompt for prompt in prompts if re.search("[一-龥]", prompt.text)]
    assert len(chinese) == 32


def test_prompts_of_a_gate(opened: Checkpoint) -> None:
    gate = Path(__file__).parents[2] / "quality" / "gates" / "tiny" / "prompts.jsonl"
    prompts = check_prompts(read_prompts(gate), opened, 32, 32)
    first = json.loads(gate.read_text(encoding="utf-8").splitlines()[0])
    assert prompts[0] == Prompt(first["prompt"], first["seed"], first["height"], first["width"])
    assert len(prompts) == 200


def test_sizes_and_seeds_of_prompts(opened: Checkpoint, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "cat", "height": 48}\n\n{"prompt": "", "seed": 9}\n')
    prompts = read_prompts(file)
    assert prompts == [Prompt("cat", 0, 48), Prompt("", 9)]
    own = opened.describe()["default_height"]
    assert check_prompts(prompts, opened) == [Prompt("cat", 0, 48, own), Prompt("", 9, own, own)]
    assert check_prompts(prompts, opened, 64, 32) == [
        Prompt("cat", 0, 48, 32),
        Prompt("", 9, 64, 32),
    ]


# ---------------------------------------------------------------------- command line


@pytest.fixture
def command(checkpoint: Path, tmp_path: Path) -> Callable[..., int]:
    def run(*arguments: object, prompts: bytes = b"cat\n", suffix: str = ".txt") -> int:
        file = (tmp_path / "prompts").with_suffix(suffix)
        file.write_bytes(prompts)
        given = ["--checkpoint", checkpoint, "--out", tmp_path / "out", "--prompts", file]
        fixed = ["--device", "cpu", "--height", 32, "--width", 32, "--steps", STEPS]
        return main([str(argument) for argument in (*given, *fixed, *arguments)])

    return run


def test_the_command(
    command: Callable[..., int],
    checkpoint: Path,
    fingerprint: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command(prompts="cat\n一只猫\n".encode()) == 0
    calibration = load_calibration(tmp_path / "out", fingerprint)
    assert capsys.readouterr().out == (
        f"{tmp_path / 'out'}: {len(calibration.names)} activations over 2 prompts\n"
    )
    assert calibration.settings["total"] == 2
    assert calibration.settings["true_cfg_scale"] == 4.0


FAILURES: dict[str, tuple[dict[str, Any], list[object], str]] = {
    "no checkpoint": ({}, ["--checkpoint", "nowhere"], "nowhere is not a folder with"),
    "no prompt file": ({}, ["--prompts", "nowhere"], "nowhere cannot be read: No such file"),
    "no prompts": ({"prompts": b" \n\n"}, [], "prompts.txt holds no prompts"),
    "no UTF-8": ({"prompts": b"\xff\xfe\n"}, [], "prompts.txt is no text in UTF-8"),
    "no JSON": (
        {"prompts": b'{"prompt": "a"}\ncat\n', "suffix": ".jsonl"},
        [],
        "prompts.jsonl, line 2 is no JSON",
    ),
    "deep JSON": (
        {"prompts": b"[" * 100_000, "suffix": ".jsonl"},
        [],
        "prompts.jsonl, line 1 is no JSON",
    ),
    "no prompt": (
        {"prompts": b'{"promt": "a"}\n', "suffix": ".jsonl"},
        [],
        "line 1 must be an object whose prompt is a text",
    ),
    "size no number": (
        {"prompts": b'{"prompt": "a", "height": "32"}\n', "suffix": ".jsonl"},
        [],
        "line 1: height is '32', but it must be a whole number from 1",
    ),
    "long prompt": (
        {"prompts": b"cat\n" + b"cat " * 1100},
        [],
        "prompt 2 has 1107 tokens, but at most 1024 are read",
    ),
    "size": ({}, ["--width", "40"], "width 40 of prompt 1 must be a multiple of 16"),
    "steps": ({}, ["--steps", "1"], "--steps is 1, but it must be at least 2"),
    "height": ({}, ["--height", "0"], "--height is 0, but it must be at least 1"),
    "offload": ({}, ["--offload"], "--offload needs --device cuda"),
    "folder": ({}, ["--out", "/proc/nowhere/out"], "/proc/nowhere: "),
}


@pytest.mark.parametrize("case", FAILURES)
def test_failures_are_one_sentence(
    command: Callable[..., int], case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    content, arguments, words = FAILURES[case]
    assert command(*arguments, **content) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("calibration failed: ")
    assert words in last


def test_an_interrupted_command_says_how_to_go_on(
    command: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupt(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(QwenImagePipeline, "__call__", interrupt)
    assert command() == 130
    assert "the same command goes on" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_while_libraries_are_imported(number: int, tmp_path: Path) -> None:
    script = (
        "import os, runpy, signal, sys\n"
        # Ignored in a shell's background jobs.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Finder:\n"
        "    def find_spec(name, *_):\n"
        f"        if name == 'torch': os.kill(os.getpid(), {int(number)})\n"
        "sys.meta_path.insert(0, Finder)\n"
        "runpy.run_module('export.calibrate', run_name='__main__', alter_sys=True)\n"
    )
    command = [sys.executable, "-c", script, "--checkpoint", "c", "--out", str(tmp_path / "out")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 130
    assert ended.stderr == "calibration interrupted: the same command goes on with it\n"
