"""The whole check on the trained checkpoint: what it says of good engines and of broken ones."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from build import manifest
from quality.gate import load_gate
from tests.conftest import ROOT
from tests.e2e.serving_helpers import perturb
from tests.starting import INTERRUPTIBLE, limited_files
from tests.waiting import wait_until
from verification import __main__ as verification
from verification.__main__ import check
from verification.cases import are_of, read_cases
from verification.report import write_report


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("verify")


@pytest.fixture(scope="module")
def report(tiny_checkpoint, tiny_repository, gate, out):
    return check(
        tiny_checkpoint, tiny_repository, manifest.read(tiny_repository), load_gate(gate), out
    )


def test_good_engines_pass(report, out):
    assert report["passed"] and not report["missed"]
    counts = {}
    for case in report["cases"]:
        counts[case["engine"]] = counts.get(case["engine"], 0) + 1
        assert case["cosine"] > 0.999999 and case["relative_error"] < 1e-3
    # Two prompts; the DiT at two levels for each, and both together in one batch.
    assert counts == {"text_encoder": 2, "modulation": 1, "dit": 6, "vae_decoder": 2}
    assert report["quality"]["distances"]["largest_difference"] <= 2
    assert report["speed"]["stages_ms"]["denoise"] > 0
    text = write_report(out, report).read_text(encoding="utf-8")
    assert "| dit | fp32 | onnx | 6 | 1.000000 |" in text
    assert json.loads((out / "report.json").read_text()) == report


def test_padding_is_part_of_the_cases(report, out):
    """The two prompts differ in length, so that one row holds padding that must not matter."""
    (padded,) = [
        case
        for case in read_cases(out / "cases.safetensors")
        if case.name == "2-padded-rows-noise-0.3"
    ]
    mask = padded.inputs["text_mask"]
    assert not mask.all()
    assert (padded.inputs["encoder_hidden_states"][~mask] != 0).all()


def test_a_broken_engine_is_named(report, tiny_checkpoint, tiny_repository, gate, out, tmp_path):
    broken = perturb(tiny_repository, tmp_path / "broken", "transformer_blocks.3.attn.to_")
    (out / "quality").exists() and shutil.rmtree(out / "quality")
    made = (out / "cases.safetensors").stat().st_mtime_ns
    found = check(tiny_checkpoint, broken, manifest.read(broken), load_gate(gate), out)
    assert (out / "cases.safetensors").stat().st_mtime_ns == made  # the same reference's
    assert not found["passed"]
    assert {sentence.split(",")[0] for sentence in found["missed"]} == {"dit"}
    assert "its cosine to torch's is 0." in found["missed"][0]
    assert "**Not passed**" in write_report(out, found).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--checkpoint", "nowhere"], "nowhere"),
        (["--checkpoint", "checkpoints/tiny", "--profile", "b9000"], "no profile 'b9000'"),
        (["--checkpoint", "checkpoints/tiny", "--gate", "nowhere"], "nowhere is no gate"),
        (["--checkpoint", "checkpoints/tiny", "--out", "README.md"], "README.md is not a folder"),
    ],
)
def test_what_cannot_be_checked_is_said(arguments, said, tmp_path):
    command = [sys.executable, "-m", "verification", "--out", tmp_path / "out", *arguments]
    command += ["--repository", tmp_path / "repository"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 2
    assert said in done.stderr and "Traceback" not in done.stderr


def test_a_gate_without_noise_levels_is_refused_before_any_work(gate, tmp_path):
    text = (gate / "gate.yaml").read_text().replace("noise_levels: [0.9, 0.3]\n", "")
    (tmp_path / "gate").mkdir()
    (tmp_path / "gate" / "gate.yaml").write_text(text)
    shutil.copy(gate / "prompts.jsonl", tmp_path / "gate")
    command = [sys.executable, "-m", "verification", "--checkpoint", "checkpoints/tiny"]
    command += ["--gate", tmp_path / "gate", "--repository", tmp_path / "repository"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "has no noise_levels: set some in its gate.yaml" in done.stderr
    assert not (tmp_path / "repository").exists()


def make_cases(out, prefix):
    gate = ROOT / "quality" / "gates" / "tiny"
    command = [sys.executable, "-m", "verification.make_cases", "--dtype", "float32", "--out", out]
    command += ["--checkpoint", "checkpoints/tiny", "--gate", gate]
    return subprocess.Popen(
        [*prefix, *command, "--reference", gate / "reference"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_cases_that_do_not_fit_are_one_sentence(tmp_path):
    path = tmp_path / "cases.safetensors"
    process = make_cases(path, limited_files(10_000))
    _, said = process.communicate(timeout=300)
    assert process.returncode == 2
    (sentence,) = said.splitlines()
    assert sentence.startswith(f"verify: {path} cannot be written: ")
    assert list(tmp_path.iterdir()) == []


def test_interrupted_cases_leave_the_word_to_who_wanted_them(tmp_path):
    process = make_cases(tmp_path / "cases.safetensors", INTERRUPTIBLE)
    libraries = Path(f"/proc/{process.pid}/maps")  # among which it is still loading others
    wait_until(lambda: "libtorch" in libraries.read_text(), timeout=60)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=300)
    # Python itself ends by the signal if it came within an exec(): a shell says 130 of both.
    assert process.returncode in (130, -signal.SIGINT)
    assert said == ""


def test_cases_that_were_cut_short_are_made_again(report, out, gate, tmp_path):
    cut = tmp_path / "cases.safetensors"
    cut.write_bytes((out / "cases.safetensors").read_bytes()[:-10])
    assert are_of(out / "cases.safetensors", out / "reference")
    assert not are_of(cut, out / "reference")


def test_a_full_disk_is_placed(monkeypatch, capsys, tmp_path):
    def fail(options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(verification, "verify", fail)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["verify", "--checkpoint", "c", "--out", str(tmp_path)])
    assert verification.main() == 2
    assert capsys.readouterr().err == f"verify: {tmp_path}: No space left on device\n"
