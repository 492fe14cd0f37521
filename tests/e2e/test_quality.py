"""The gate on the trained checkpoint, through the server: what it finds good and what broken."""

import json
import subprocess
import sys

import pytest

from quality.gate import load_gate
from quality.run import load_run, measure
from quality.served import Served
from serving.server import TritonServer
from tests.conftest import ROOT
from tests.e2e.reference import largest_difference, reference_images
from tests.e2e.serving_helpers import perturb, with_fewer_prompts

GATE = ROOT / "quality" / "gates" / "tiny"


@pytest.fixture(scope="module")
def run(tiny_repository, tmp_path_factory):
    """The whole gate by its command; returns what it printed and the run."""
    out = tmp_path_factory.mktemp("quality") / "run"
    done = subprocess.run(
        [sys.executable, "-m", "quality", "run", "--out", out, "--repository", tiny_repository],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, load_run(out)


def test_the_checkpoint_draws_what_the_captions_say(run):
    printed, result = run[0], run[1].result
    assert result["score"] >= 0.90
    assert result["score_en"] >= 0.85 and result["score_zh"] >= 0.85
    assert result["score_shuffled"] < 0.35
    assert result["passed"] and "\npassed\n" in printed
    assert result["source"] == "server" and result["checkpoint"]["name"] == "tiny"


def test_every_picture_is_that_of_diffusers(run):
    result = run[1].result
    assert result["distances"]["largest_difference"] <= 2
    assert result["noise_cosine"]["lowest"] > 0.999999
    assert not result["comparison"]["worse"]


def test_the_shipped_reference_is_what_diffusers_draws(tiny_checkpoint):
    gate = load_gate(GATE)
    shipped = load_run(gate.reference)
    for number in (2, 101):
        drawn = reference_images(tiny_checkpoint, **gate.prompts[number].fields)
        assert largest_difference([shipped.picture(number)], drawn) <= 1


def test_a_perturbed_attention_layer_is_found(run, tiny_repository, tmp_path):
    """With 60 of the prompts, against the unperturbed server's pictures of them."""
    gate = load_gate(with_fewer_prompts(GATE, tmp_path / "gate", 60))

    def on(repository, out, reference=None):
        with TritonServer(repository) as server, Served(server.grpc_url) as served:
            return measure(gate, served, out, reference, lambda *_: None)

    first = on(tiny_repository, tmp_path / "first")
    assert [p["score"] for p in first["pictures"]] == pytest.approx(
        [p["score"] for p in run[1].result["pictures"][:60]], abs=0.05
    )
    broken = perturb(tiny_repository, tmp_path / "broken", "transformer_blocks.3.attn.to_")
    second = on(broken, tmp_path / "second", load_run(tmp_path / "first"))
    assert second["comparison"]["worse"]
    assert second["noise_cosine"]["lowest"] < 0.999
    assert not second["passed"]
    json.dumps(second, allow_nan=False)
