"""Several engines at a time make the same engines as one after the other."""

import subprocess
import sys

import onnx

from export.write import DATA, MODEL
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


def operators(folder):
    graph = onnx.load(folder / MODEL, load_external_data=False).graph
    return sorted(node.op_type for node in graph.node)


def test_two_workers(checkpoint, repository, tmp_path):
    command = [sys.executable, "-c", SCRIPT, checkpoint, tmp_path]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    for engine in ("text_encoder", "modulation", "dit", "vae_decoder"):
        expected = repository / "model_repository" / engine / "1"
        sizes = [(folder / DATA).stat().st_size for folder in (tmp_path / engine, expected)]
        assert sizes[0] == sizes[1], engine
        assert operators(tmp_path / engine) == operators(expected), engine
    assert not list(tmp_path.glob("*.partial"))
