"""From a checkpoint to a repository with TensorRT-RTX engines, killed at every stage on the way."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tensorrt_rtx

from build import engine_builder, manifest
from build.assemble import assemble
from build.onnx_stage import DESCRIPTION, open_onnx
from build.profile import BuildError, load_profile, with_dit_precision
from build.stage import ENTRY, read_entry
from export import ExportError
from export.calibration import FORMAT, read_calibration, save_calibration
from serving.engines import Gpu, check_machine
from serving.errors import ServeError
from serving.installation import Installation, find_installation
from serving.repository import check_repository
from tests.conftest import ROOT
from tests.make_checkpoint import cached_checkpoint

# `make onnx` and `make export`, over two prompts of two steps, ended by a signal at a moment that
# is given as what the progress bar is told.
SCRIPT = """
import os, sys
from pathlib import Path
import build.calibration, build.__main__
from build.progress import ProgressBar
prompts, moment, least, number, *arguments = sys.argv[1:]
build.calibration.PROMPTS, build.calibration.STEPS = Path(prompts), 2
told = ProgressBar.__call__
def tell(self, what, done, total):
    told(self, what, done, total)
    if moment and what.endswith(moment) and done >= int(least):
        os.kill(os.getpid(), int(number))
ProgressBar.__call__ = tell
sys.argv = ["build", *arguments]
sys.exit(build.__main__.main())
"""
ENGINES = ("text_encoder", "modulation", "dit", "vae_decoder")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def run(folder):
    (folder / "prompts.txt").write_text("a red fox\n一只猫\n", encoding="utf-8")

    def run(*arguments, at="", least=0, number=signal.SIGKILL):
        command = [sys.executable, "-c", SCRIPT, str(folder / "prompts.txt")]
        command += [at, str(least), str(int(number)), *map(str, arguments)]
        command += ["--profile", "rtx", "--onnx", str(folder / "onnx")]
        command += ["--repository", str(folder / "repository")]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)

    return run


@pytest.fixture(scope="module")
def onnx(folder, run):
    """The ONNX stage, made in four runs."""
    stage = folder / "onnx"
    command = ("onnx", "--checkpoint", cached_checkpoint(blocks=1))

    assert run(*command, at="calibrate", least=3).returncode == -signal.SIGKILL
    (ranges,) = stage.glob("calibration-*.safetensors")
    assert read_calibration(ranges).settings["done"] == 1

    killed = run(*command, at="dit: weights")
    assert killed.returncode == -signal.SIGKILL
    assert "no CALIBRATION was named, so it is made" in killed.stderr
    assert read_calibration(ranges).settings["done"] == 2
    assert [name for name in ENGINES if read_entry(stage / name)] == ["text_encoder", "modulation"]
    with pytest.raises(BuildError, match="is no finished ONNX stage"):
        open_onnx(load_profile("rtx"), stage)

    ended = run(*command, at="vae_decoder: trace", number=signal.SIGTERM)
    assert ended.returncode == 130
    assert ended.stderr.splitlines()[-1].startswith("export interrupted: the repository is as it w")
    assert "text_encoder: trace" not in ended.stderr
    assert "CALIBRATION" not in ended.stderr
    assert "dit: trace" in ended.stderr
    assert not list(stage.glob("*.partial"))

    whole = run(*command)
    assert (whole.returncode, whole.stdout.splitlines()[-1]) == (0, f"{stage}: exported")
    assert "dit: trace" not in whole.stderr
    return stage


@pytest.fixture(scope="module")
def repository(folder, run, onnx):
    """Built for SM120 from the stage alone, in three runs."""
    built = onnx / "engines" / "sm120"
    command = ("export", "--target", "sm120")

    assert run(*command, at="dit: build for sm120").returncode == -signal.SIGKILL
    assert [name for name in ENGINES if read_entry(built / name)] == ["text_encoder", "modulation"]
    before = (built / "text_encoder" / "model.rtx").stat().st_mtime_ns

    # As engines were built, and their files not yet put together.
    assert run(*command, at="vae_decoder: build for sm120", least=100).returncode < 0
    assert not (folder / "repository").exists()

    whole = run(*command)
    assert whole.stdout.splitlines()[-1] == f"{folder / 'repository'}: exported", whole.stderr
    assert (built / "text_encoder" / "model.rtx").stat().st_mtime_ns == before
    assert not list(built.glob("*.partial"))
    assert run(*command).stdout.splitlines()[-1] == f"{folder / 'repository'}: up to date"
    return folder / "repository"


def test_the_repository_is_complete_and_says_what_it_holds(repository, onnx):
    contents = manifest.read(repository)
    assert manifest.is_intact(repository, contents)
    checkpoint = contents["checkpoint"]["fingerprint"]
    profile = load_profile("rtx")
    for name, entry in contents["engines"].items():
        assert (entry["library"], entry["target"], entry["device"]) == (
            "tensorrt_rtx",
            "sm120",
            None,
        )
        assert entry["runtime"] == "rtx"
        assert entry["files"] == ["model.rtx", "model.json"]
        assert entry["precision"] == profile.engines[name].precision
        assert entry["verified"]["mode"] == "whole"
        assert entry["made_from"]["checkpoint"] == checkpoint
        assert len(entry["made_from"]["recipe"]) == 64
        assert entry["weight_streaming"] == profile.engines[name].weight_streaming
        version = repository / "model_repository" / name / "1"
        assert {path.name for path in version.iterdir()} == {"model.rtx", "model.json", ".gitkeep"}
        assert json.loads((version / "model.json").read_text())["profiles"] == entry["profiles"]
        stage = onnx / "engines" / "sm120" / name / "model.rtx"
        assert (version / "model.rtx").samefile(stage)  # the disk holds it once
    assert contents["engines"]["dit"]["inputs"]["hidden_states"] == {
        "dtype": "BF16",
        "shape": [-1, -1, 64],
    }
    assert contents["engines"]["dit"]["profiles"][0]["position_ids"] == {
        "min": [1, 256 + 32, 3],
        "opt": [2, 4096 + 128, 3],
        "max": [2, 6889 + 1024, 3],
    }


def test_it_may_be_served_where_its_gpu_is_and_nowhere_else(repository):
    check_repository(repository, "rtx")
    installation = find_installation()
    contents = manifest.read(repository)
    check_machine(contents, installation, None, Gpu("NVIDIA GeForce RTX 5090", "sm120"))
    with pytest.raises(ServeError, match="built for sm120, and the GPU here, RTX 4090, is sm89"):
        check_machine(contents, installation, None, Gpu("RTX 4090", "sm89"))


def test_the_same_stage_serves_the_other_target(repository, onnx, tmp_path):
    profile = load_profile("rtx")
    assert assemble(None, profile, tmp_path / "ada", onnx=onnx, target="sm89")
    engines = manifest.read(tmp_path / "ada")["engines"]
    assert {entry["target"] for entry in engines.values()} == {"sm89"}
    assert not assemble(None, profile, repository, onnx=onnx, target="sm120")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of RTX: it times nothing
def test_tensorrt_makes_plans_through_the_same_path(onnx, tmp_path, monkeypatch):
    """TensorRT-RTX under the name of TensorRT: its API, without the other's need of a GPU."""
    monkeypatch.setitem(sys.modules, "tensorrt", tensorrt_rtx)
    gpu = Gpu("NVIDIA H200", "sm90")
    monkeypatch.setattr("build.engine_builder.find_gpu", lambda: engine_builder.Gpu(*gpu))
    profile, repository = load_profile("h200"), tmp_path / "h200"
    assert assemble(None, profile, repository, onnx=onnx)
    assert not assemble(None, profile, repository, onnx=onnx)
    contents = check_repository(repository, "h200")
    for name, entry in contents["engines"].items():
        assert (entry["library"], entry["artifact"]) == ("tensorrt", "model.plan")
        assert (entry["target"], entry["device"]) == ("sm90", "NVIDIA H200")
        assert len(entry["profiles"]) == len(profile.engines[name].shapes)
    assert (onnx / "engines" / "sm90" / "timing.cache").stat().st_size > 100
    triton = Installation(Path("/tritonserver"), {"tensorrt": Path("/")}, [], [])
    version = ".".join(tensorrt_rtx.__version__.split(".")[:3])
    check_machine(contents, triton, version, gpu)
    with pytest.raises(ServeError, match=rf"built by TensorRT {version}, and the server here has"):
        check_machine(contents, triton, "10.13.3", gpu)
    # Timed on another card.
    monkeypatch.setattr(
        "build.engine_builder.find_gpu", lambda: engine_builder.Gpu("NVIDIA H100", "sm90")
    )
    assert assemble(None, profile, repository, onnx=onnx)
    assert manifest.read(repository)["engines"]["dit"]["device"] == "NVIDIA H100"


# ---------------------------------------------------------------------- what is refused


def refused(onnx, tmp_path, profile="rtx", **options):
    if isinstance(profile, str):
        profile = load_profile(profile)
    with pytest.raises(BuildError) as error:
        assemble(None, profile, tmp_path / "repository", onnx=onnx, **options)
    assert not (tmp_path / "repository").exists()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_cannot_be_built_here_ends_with_a_sentence(onnx, tmp_path, monkeypatch):
    monkeypatch.setattr("build.engine_builder.find_gpu", lambda: None)
    kept = f"the ONNX stage is kept in {onnx}, from which `make export PROFILE="
    said = refused(onnx, tmp_path)
    assert "TensorRT-RTX compiles for sm120 or sm89, and torch finds no GPU here: name one" in said
    assert kept in said
    # Made by the same recipes.
    said = refused(onnx, tmp_path, "h200")
    assert "TensorRT is not installed" in said
    assert "nvidia/tensorrt:<yy.mm>-py3" in said
    assert kept in said


def test_a_target_of_another_profile_is_refused_before_anything_is_done(onnx, tmp_path):
    said = refused(onnx, tmp_path, target="sm90")
    assert said == "the profile 'rtx' builds for sm120 or sm89, not for 'sm90'"
    assert refused(onnx, tmp_path, "cpu", target="sm90").endswith(
        "for no GPU at all, not for 'sm90'"
    )


def test_a_stage_of_other_recipes_or_code_is_refused(onnx, tmp_path, monkeypatch):
    said = refused(onnx, tmp_path, "ampere")
    assert "was made for the profile 'rtx', by another recipe for text_encoder" in said
    assert "`make onnx CHECKPOINT=<dir> PROFILE=ampere" in said
    said = refused(onnx, tmp_path, with_dit_precision(load_profile("rtx"), "nvfp4"))
    assert "by another recipe for dit than PROFILE=rtx DIT_PRECISION=nvfp4 has here: name" in said
    assert f"`make onnx CHECKPOINT=<dir> PROFILE=rtx DIT_PRECISION=nvfp4 ONNX={onnx}`" in said
    monkeypatch.setattr("build.onnx_stage.sources", lambda: "other")
    assert "made by another version of this project's export/" in refused(onnx, tmp_path)


def test_a_foreign_calibration_costs_nothing(onnx, tmp_path):
    foreign = tmp_path / "ranges"
    settings = {"format": FORMAT, "checkpoint": "0" * 64, "done": 1, "total": 1}
    save_calibration(foreign, settings, {}, {})
    options = {"onnx": onnx, "calibration": foreign}
    with pytest.raises(ExportError, match="was made from another checkpoint"):
        assemble(cached_checkpoint(blocks=1), load_profile("rtx"), tmp_path / "r", **options)
    assert open_onnx(load_profile("rtx"), onnx).engines.keys() == set(ENGINES)


def test_a_folder_that_was_damaged_on_its_way_is_refused(onnx, tmp_path):
    carried = tmp_path / "carried"
    shutil.copytree(onnx, carried)
    data = bytearray((carried / "dit" / "model.onnx.data").read_bytes())
    data[0] ^= 1
    (carried / "dit" / "model.onnx.data").write_bytes(data)
    assert "lacks dit, or it is damaged" in refused(carried, tmp_path, target="sm120")


def test_an_entry_that_was_edited_on_its_way_is_refused(onnx, tmp_path):
    carried = tmp_path / "carried"
    shutil.copytree(onnx, carried)
    for name, said in (("dit", "lacks dit, or it is"), (DESCRIPTION, "is no finished ONNX stage")):
        path = carried / name / ENTRY
        entry = json.loads(path.read_text())
        path.write_text(json.dumps({**entry, "result": {}}))
        assert said in refused(carried, tmp_path, target="sm120")
        path.write_text(json.dumps(entry))


def test_a_folder_that_is_no_stage_is_refused(tmp_path):
    said = refused(tmp_path / "nowhere", tmp_path, target="sm120")
    assert "no checkpoint was named (CHECKPOINT=<dir>)" in said
    assert f"{tmp_path / 'nowhere'} is no finished ONNX stage" in said
