import json
import shutil
import subprocess
import sys

import pytest

from build import manifest
from build.assemble import ROOT, assemble, assemble_onnx
from build.onnx_stage import is_verified
from build.profile import BuildError, load_profile
from build.swap import replaced_when_done
from export import ExportError, ignore_progress
from tests.conftest import exported


@pytest.fixture(scope="module")
def repository(checkpoint):
    """Served by nobody: Python would leave its caches beside the models."""
    return exported("not-served", checkpoint)


def files_of(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_the_repository_is_complete_and_its_manifest_true(repository):
    contents = manifest.read(repository)
    assert contents["profile"] == "cpu"
    assert set(contents["engines"]) == {"text_encoder", "modulation", "dit", "vae_decoder"}
    assert contents["engines"]["dit"]["runtime"] == "onnx"
    assert contents["engines"]["dit"]["inputs"]["hidden_states"] == {
        "dtype": "FP32",
        "shape": [-1, -1, 64],
    }
    on_disk = {name for name in files_of(repository) if name != "manifest.json"}
    assert on_disk == set(contents["files"])
    assert manifest.is_intact(repository, contents)
    for model in ("qwen_image", "tokenize", "denoise", "encode_image", *contents["engines"]):
        assert f"model_repository/{model}/config.pbtxt" in on_disk
    assert "backends/engine/model.py" in on_disk
    assert "model_repository/checkpoint.json" in on_disk


def test_it_names_no_folder_of_the_machine_that_built_it(repository):
    for name, data in files_of(repository).items():
        if not name.endswith(".data"):
            assert str(ROOT).encode() not in data, name
            assert str(repository).encode() not in data, name


def test_a_second_export_with_nothing_changed_does_nothing(repository, checkpoint):
    before = {path: path.stat().st_mtime_ns for path in repository.rglob("*")}
    assert not assemble(checkpoint, load_profile("cpu"), repository)
    assert {path: path.stat().st_mtime_ns for path in repository.rglob("*")} == before


def exporter_that_takes(repository, calls):
    """Stands for `export_checkpoint`, which takes half a minute: copies what it has made."""

    def export(checkpoint, output, *settings):
        kept, finished, _ = settings[-3:]
        models = repository / "model_repository"
        engines = manifest.read(repository)["engines"]
        for name in engines.keys() - kept.keys():
            calls.append(name)
            (output / name).mkdir(parents=True)
            for file in engines[name]["files"]:
                shutil.copy(models / name / "1" / file, output / name)
            finished(name, engines[name])
        shutil.copy(models / "checkpoint.json", output)
        shutil.copy(models / "tokenize/1/tokenizer.json", output)

    return export


@pytest.mark.parametrize(
    "damaged",
    ["model_repository/dit/1/model.onnx.data", "model_repository/tokenize/1/tokenizer.json"],
)
def test_a_damaged_repository_is_rebuilt(damaged, repository, checkpoint, tmp_path, monkeypatch):
    copy = tmp_path / "copy"
    shutil.copytree(repository, copy)
    path = copy / damaged
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    assert not manifest.is_intact(copy, manifest.read(copy))
    calls = []
    exporter = exporter_that_takes(repository, calls)
    monkeypatch.setattr("build.onnx_stage.export_checkpoint", exporter)
    assert assemble(checkpoint, load_profile("cpu"), copy)
    assert sorted(calls) == ["dit", "modulation", "text_encoder", "vae_decoder"]
    assert manifest.is_intact(copy, manifest.read(copy))
    assert files_of(copy).keys() == files_of(repository).keys()
    assert not assemble(checkpoint, load_profile("cpu"), copy)


def test_edited_limits_stay_and_are_not_replaced_silently(
    repository, checkpoint, other_checkpoint, tmp_path
):
    copy = tmp_path / "copy"
    shutil.copytree(repository, copy)
    config = copy / "model_repository/denoise/config.pbtxt"
    edited = config.read_text().replace('"8"', '"3"')
    config.write_text(edited)
    assert not assemble(checkpoint, load_profile("cpu"), copy)
    with pytest.raises(BuildError, match=r"edited \(model_repository/denoise/config.pbtxt\)"):
        assemble(other_checkpoint, load_profile("cpu"), copy)
    assert config.read_text() == edited


def test_files_that_no_export_wrote_stay(repository, checkpoint, other_checkpoint, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(repository, copy)
    (copy / "model_repository/dit/1/model.cache").write_text("a runtime's")
    mine = copy / "model_repository/mine/config.pbtxt"
    mine.parent.mkdir()
    mine.write_text("backend: ...")
    assert not assemble(checkpoint, load_profile("cpu"), copy)
    said = r"files that no export wrote \(model_repository/mine/config.pbtxt\)"
    with pytest.raises(BuildError, match=said):
        assemble(other_checkpoint, load_profile("cpu"), copy)
    assert mine.read_text() == "backend: ..."


def test_engines_that_were_checked_by_blocks_are_checked_again_for_full():
    by_blocks, whole = {"verified": {"mode": "blocks"}}, {"verified": {"mode": "whole"}}
    assert is_verified({"dit": by_blocks}, "auto")
    assert not is_verified({"dit": by_blocks, "vae_decoder": whole}, "full")
    assert is_verified({"vae_decoder": whole}, "full")


def test_ranges_for_nothing_are_refused(checkpoint, tmp_path):
    with pytest.raises(BuildError, match=r"^CALIBRATION is for making the ONNX stage"):
        assemble(
            None, load_profile("cpu"), tmp_path / "r", calibration=tmp_path, onnx=tmp_path / "s"
        )


def test_a_file_damaged_in_both_places_is_made_anew(repository, checkpoint, tmp_path, monkeypatch):
    """The repository's files and the stages' are the same, by hard links."""
    calls = []
    exporter = exporter_that_takes(repository, calls)
    monkeypatch.setattr("build.onnx_stage.export_checkpoint", exporter)
    target = tmp_path / "repository"
    assert assemble(checkpoint, load_profile("cpu"), target)
    weights = target / "model_repository/dit/1/model.onnx.data"
    assert weights.samefile(tmp_path / "repository.onnx/dit/model.onnx.data")
    whole, calls[:] = weights.read_bytes(), []
    with weights.open("r+b") as file:
        file.write(bytes([whole[0] ^ 1]))
    assert assemble(checkpoint, load_profile("cpu"), target)
    assert calls == ["dit"]
    assert weights.read_bytes() == whole


def test_another_checkpoint_is_exported_anew(
    repository, checkpoint, other_checkpoint, tmp_path, monkeypatch
):
    calls = []
    exporter = exporter_that_takes(repository, calls)
    monkeypatch.setattr("build.onnx_stage.export_checkpoint", exporter)
    target = tmp_path / "repository"
    for number, path in enumerate((checkpoint, other_checkpoint), 1):
        assert assemble(path, load_profile("cpu"), target)
        assert len(calls) == 4 * number


@pytest.mark.parametrize("changed", ["versions", "sources"])
def test_stages_of_other_versions_or_code_are_made_anew(
    changed, repository, checkpoint, tmp_path, monkeypatch
):
    calls = []
    exporter = exporter_that_takes(repository, calls)
    monkeypatch.setattr("build.onnx_stage.export_checkpoint", exporter)
    target = tmp_path / "repository"
    assert assemble(checkpoint, load_profile("cpu"), target)
    shutil.rmtree(target)
    assert assemble(checkpoint, load_profile("cpu"), target)
    assert len(calls) == 4  # the stages were kept
    monkeypatch.setattr(f"build.onnx_stage.{changed}", lambda: {"torch": "0"})
    assert assemble(checkpoint, load_profile("cpu"), target)
    assert len(calls) == 8


def test_an_interrupted_export_leaves_the_old_repository_untouched(tmp_path):
    target = tmp_path / "repository"
    target.mkdir()
    (target / "old").write_text("old")
    with pytest.raises(KeyboardInterrupt), replaced_when_done(target) as staging:
        (staging / "new").write_text("half")
        raise KeyboardInterrupt
    assert files_of(target) == {"old": b"old"}
    assert not [path for path in tmp_path.iterdir() if "staging" in path.name]


def test_a_killed_export_leaves_the_old_repository_and_the_next_one_cleans_up(tmp_path):
    target = tmp_path / "repository"
    target.mkdir()
    (target / "old").write_text("old")
    script = (
        "import os, pathlib, sys\nfrom build.swap import replaced_when_done\n"
        "with replaced_when_done(pathlib.Path(sys.argv[1])) as staging:\n"
        "    (staging / 'new').write_text('half')\n    os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(target)], cwd=ROOT, check=False)
    assert files_of(target) == {"old": b"old"}
    with replaced_when_done(target) as staging:
        assert list(staging.iterdir()) == []
        (staging / "new").write_text("whole")
    assert files_of(target) == {"new": b"whole"}


def test_two_exports_into_one_folder_do_not_mix(tmp_path):
    target = tmp_path / "repository"
    with (
        replaced_when_done(target),
        pytest.raises(BuildError, match="another export"),
        replaced_when_done(target),
    ):
        pass


def test_a_folder_with_other_contents_is_not_replaced(tmp_path, checkpoint):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(BuildError, match="holds no exported repository"):
        assemble(checkpoint, load_profile("cpu"), tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_stages_do_not_replace_a_checkpoint(checkpoint, tmp_path):
    """Its folders have the names of engines."""
    mine = tmp_path / "mine"
    shutil.copytree(checkpoint, mine)
    before = files_of(mine)
    with pytest.raises(BuildError, match="mine is not empty and holds no ONNX stage"):
        assemble(checkpoint, load_profile("cpu"), tmp_path / "repository", onnx=mine)
    assert files_of(mine) == before


def test_a_file_where_a_folder_should_be_is_named(checkpoint, tmp_path):
    profile, file = load_profile("cpu"), tmp_path / "file"
    file.write_text("years of work")
    with pytest.raises(BuildError, match=r"file is no folder: name one for the ONNX stage$"):
        assemble(checkpoint, profile, tmp_path / "repository", onnx=file)
    with pytest.raises(BuildError, match=r"file is no folder: name one for the repository$"):
        assemble(checkpoint, profile, file)
    assert list(tmp_path.iterdir()) == [file]


def test_a_calibration_that_is_refused_leaves_nothing(checkpoint, tmp_path):
    with pytest.raises(ExportError, match="no-ranges is missing"):
        assemble_onnx(
            checkpoint,
            load_profile("b300"),
            "auto",
            ignore_progress,
            1,
            tmp_path / "no-ranges",
            tmp_path / "stage",
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("inside", ["", "stages", ".."])
def test_stages_are_not_within_the_repository(inside, checkpoint, tmp_path):
    target = tmp_path / "repository"
    with pytest.raises(BuildError, match=r"the stages in .* cannot be one in the other"):
        assemble(checkpoint, load_profile("cpu"), target, onnx=target / inside)
    assert not target.exists()


def test_an_unknown_profile_lists_those_there_are():
    with pytest.raises(BuildError, match=r"no profile 'b301'; the profiles are .*cpu"):
        load_profile("b301")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--checkpoint", "/nowhere"], "/nowhere"),
        (["--checkpoint", "tests"], "model_index.json"),
        (["--checkpoint", "tests", "--profile", "nope"], "no profile 'nope'"),
    ],
)
def test_the_command_line_fails_with_one_sentence(arguments, said, tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "build", *arguments, "--repository", str(tmp_path / "r")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert said in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "r").exists()


def test_the_manifest_is_json_with_checksums(repository):
    files = json.loads((repository / "manifest.json").read_text())["files"]
    assert all(len(entry["sha256"]) == 64 and entry["bytes"] >= 0 for entry in files.values())
