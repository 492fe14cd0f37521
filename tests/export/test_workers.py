"""Several engines at a time give the same files as one after the other."""

import subprocess
import sys

from build.manifest import digest
from tests.conftest import ROOT

# The parent has computed with threads, which a forked process must not wait for.
SCRIPT = """
import sys, torch
from pathlib import Path
from export import Checkpoint, export_checkpoint
torch.set_num_threads(2)
torch.nn.functional.gelu(torch.randn(10**7))
export_checkpoint(Checkpoint(Path(sys.argv[1])), Path(sys.argv[2]), workers=2)
"""


def test_two_workers(checkpoint, exported, tmp_path):
    command = [sys.executable, "-c", SCRIPT, checkpoint, tmp_path]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    for engine in ("text_encoder", "modulation", "dit", "vae_decoder"):
        for name in ("model.onnx", "model.onnx.data"):
            expected = exported.folder / engine / name
            assert digest(tmp_path / engine / name) == digest(expected), (engine, name)
    assert not list(tmp_path.glob("*.partial"))
