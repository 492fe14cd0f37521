"""`make demo`, by the command behind it."""

import subprocess
import sys

import numpy as np
from PIL import Image

from quality.judge import judge
from tests.conftest import ROOT

PROMPT = "a red circle on the left and a blue square on the right, white background"


def demo(repository, output, prompt=PROMPT):
    arguments = ["--prompt", prompt, "--output", output, "--repository", repository, "--seed", "7"]
    return subprocess.run(
        [sys.executable, "-m", "serving.demo", *arguments], cwd=ROOT, capture_output=True, text=True
    )


def test_the_demo_draws_the_prompt(tiny_repository, tmp_path):
    done = demo(tiny_repository, tmp_path / "demo.png")
    assert done.returncode == 0, done.stderr
    picture = np.asarray(Image.open(tmp_path / "demo.png"))
    assert picture.shape == (128, 128, 3)
    assert judge(PROMPT, picture).score >= 0.9
    assert "demo.png: seed 7 (" in done.stdout


def test_a_demo_that_cannot_write(tiny_repository, tmp_path):
    done = demo(tiny_repository, tmp_path / "missing" / "demo.png")
    assert (done.returncode, "there is no folder for" in done.stderr) == (1, True)
    done = demo(tiny_repository, tmp_path / "demo.docx")
    assert (done.returncode, "has no suffix of a picture" in done.stderr) == (1, True)
