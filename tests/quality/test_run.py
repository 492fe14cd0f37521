"""A run without a server: pictures from the renderer, in place of a model."""

import json

import numpy as np
import pytest
import yaml

from quality import __main__ as command
from quality.captions import describe
from quality.gate import QualityError, load_gate
from quality.run import compare, load_run, measure
from quality.source import Picture
from quality.world import LANGUAGES, PICTURE_SIZES, random_scene, render


class Renderer:
    """Draws the right pictures, but for a share of `wrong` ones, which are empty."""

    def __init__(self, scenes, wrong=0.0, noise=0.0):
        self.scenes, self.wrong, self.noise = scenes, wrong, noise

    def describe(self):
        return {"source": "renderer", "checkpoint": None, "versions": {"renderer": "1"}}

    def draw(self, prompts):
        for number in reversed(range(len(prompts))):  # any order is allowed
            scene = self.scenes[number]
            pixels = render(scene)
            if number < self.wrong * len(prompts):
                pixels[:] = pixels[0, 0]
            yield Picture(number, pixels)

    def latents(self, prompt):
        rng = np.random.default_rng(prompt.fields["seed"])
        return 3.0 + 2.0 * rng.standard_normal((16, 4, 6), np.float32)

    def predict_noise(self, prompt, latents, level):
        shift = np.random.default_rng(7).standard_normal(latents.shape, np.float32)
        return latents * (1 + level) + self.noise * shift


@pytest.fixture(scope="module")
def scenes():
    rng = np.random.default_rng(0)
    return [random_scene(rng, PICTURE_SIZES[i // 2 % 3]) for i in range(24)]


@pytest.fixture
def gate_folder(tmp_path, scenes):
    folder = tmp_path / "gate"
    folder.mkdir()
    rng = np.random.default_rng(1)
    lines = []
    for i, scene in enumerate(scenes):
        language = LANGUAGES[i % 2]
        entry = {"prompt": describe(scene, language, rng), "language": language, "seed": i}
        lines.append(json.dumps(entry | {"width": scene.width, "height": scene.height}))
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    rewrite(folder, judge="world", noise_levels=[0.9, 0.1], noise_prompts=3)
    return folder


def rewrite(folder, **changes):
    path = folder / "gate.yaml"
    settings = yaml.safe_load(path.read_text()) if path.exists() else {}
    path.write_text(yaml.safe_dump(settings | changes))
    return load_gate(folder)


def run(gate, source, out, reference=None):
    return measure(gate, source, out, reference and load_run(reference), lambda *_: None)


def test_a_run_without_a_reference(gate_folder, scenes, tmp_path):
    result = run(load_gate(gate_folder), Renderer(scenes), tmp_path / "out")
    assert load_run(tmp_path / "out").result == result
    assert result["score"] >= 0.98
    assert result["score_low"] <= result["score"] <= result["score_high"]
    assert result["score_en"] >= 0.98 and result["score_zh"] >= 0.98
    assert result["score_shuffled"] <= 0.35
    assert set(result["groups"]) == {"en", "zh", "128x128", "112x144", "144x112"}
    assert result["groups"]["en"]["count"] == 12
    assert {"objects", "colour", "shape"} <= set(result["parts"])
    assert result["passed"] is None and result["missed"] == []  # no thresholds, no reference
    assert result["versions"]["renderer"] == "1" and "scikit-image" in result["versions"]
    assert "distances" not in result and "noise_cosine" not in result
    assert len(list((tmp_path / "out" / "pictures").iterdir())) == 24
    np.testing.assert_array_equal(load_run(tmp_path / "out").picture(5), render(scenes[5]))
    assert result["pictures"][5]["seed"] == 5
    sheet = tmp_path / "out" / "contact_sheet.png"
    assert sheet.stat().st_size > 1000


def test_noise_inputs_are_normalised_mixtures(gate_folder, scenes, tmp_path):
    run(load_gate(gate_folder), Renderer(scenes), tmp_path / "out")
    noise = load_run(tmp_path / "out").noise()
    assert noise["levels"].tolist() == pytest.approx([0.9, 0.1])
    assert sorted(n for n in noise if n.startswith("latents")) == [
        "latents_0",
        "latents_16",
        "latents_8",
    ]
    late = np.concatenate([noise[f"latents_{n}"][1].reshape(16, -1) for n in (0, 8, 16)], axis=1)
    assert np.abs(late.mean(1)).max() < 0.1
    assert np.abs(late.std(1) - 0.9).max() < 0.05


def test_the_same_again_is_not_worse(gate_folder, scenes, tmp_path):
    gate = load_gate(gate_folder)
    run(gate, Renderer(scenes), tmp_path / "first")
    result = run(gate, Renderer(scenes), tmp_path / "second", tmp_path / "first")
    assert result["distances"]["psnr"] == 100.0
    assert result["distances"]["largest_difference"] == 0
    assert result["noise_cosine"]["lowest"] == pytest.approx(1.0)
    assert result["noise_cosine"]["0.9"]["mean"] == pytest.approx(1.0)
    assert not result["comparison"]["worse"]
    assert result["passed"]


def test_wrong_pictures_are_worse_and_wrong_predictions_are_seen(gate_folder, scenes, tmp_path):
    gate = load_gate(gate_folder)
    run(gate, Renderer(scenes), tmp_path / "first")
    source = Renderer(scenes, wrong=0.5, noise=1.0)
    result = run(gate, source, tmp_path / "second", tmp_path / "first")
    assert result["comparison"]["worse"] and not result["passed"]
    assert "worse than the reference: score" in result["missed"][0]
    assert result["noise_cosine"]["lowest"] < 0.95
    assert result["distances"]["flip"] > 0.01
    assert command.main(["compare", str(tmp_path / "first"), str(tmp_path / "second")]) == 1
    assert command.main(["compare", str(tmp_path / "second"), str(tmp_path / "first")]) == 0


def test_thresholds(gate_folder, scenes, tmp_path):
    gate = rewrite(
        gate_folder,
        at_least={"score": 0.9, "parts.shape.score": 0.9},
        at_most={"score_shuffled": 0.3, "distances.flip": 0.5},
    )
    assert run(gate, Renderer(scenes), tmp_path / "good")["passed"]
    result = run(gate, Renderer(scenes, wrong=1.0), tmp_path / "bad")
    assert not result["passed"]
    assert "score is 0; it must be at least 0.9" in result["missed"]
    assert "parts.shape.score is 0; it must be at least 0.9" in result["missed"]
    gate = rewrite(gate_folder, at_most={"distances.flip": 0.5})
    assert run(gate, Renderer(scenes), tmp_path / "no reference")["passed"]
    gate = rewrite(gate_folder, at_least={})
    assert run(gate, Renderer(scenes), tmp_path / "nothing to judge by")["passed"] is None
    run(gate, Renderer(scenes, wrong=1.0), tmp_path / "worse", tmp_path / "good")


def test_thresholds_do_not_hold_for_other_fields(gate_folder, scenes, tmp_path):
    gate = rewrite(gate_folder, at_least={"score": 0.9}).with_fields(num_inference_steps=4)
    result = run(gate, Renderer(scenes, wrong=1.0), tmp_path / "out")
    assert "passed" not in result
    assert result["fields"]["num_inference_steps"] == 4
    assert result["pictures"][0]["num_inference_steps"] == 4


def test_without_a_judge(gate_folder, scenes, tmp_path):
    gate = rewrite(gate_folder, judge=None, at_least={"distances.psnr": 99})
    result = run(gate, Renderer(scenes), tmp_path / "reference")
    assert "score" not in result and result["passed"] is None
    near = run(gate, Renderer(scenes), tmp_path / "near", tmp_path / "reference")
    far = run(gate, Renderer(scenes, wrong=0.5), tmp_path / "far", tmp_path / "reference")
    assert near["passed"] and not far["passed"]
    comparison = compare(near, far, 0.01)
    assert comparison["measure"] == "flip" and comparison["worse"]
    assert comparison["first"] == pytest.approx(0, abs=1e-6) and comparison["second"] > 0.01
    assert comparison["low"] <= comparison["difference"] <= comparison["high"]
    assert not compare(far, near, 0.01)["worse"]
    with pytest.raises(QualityError, match="neither a judge's scores nor distances to the same"):
        compare(result, near, 0.01)


def test_runs_of_other_prompts_are_not_compared(gate_folder, scenes, tmp_path):
    first = run(load_gate(gate_folder), Renderer(scenes), tmp_path / "first")
    lines = (gate_folder / "prompts.jsonl").read_text().splitlines()
    (gate_folder / "prompts.jsonl").write_text("\n".join(lines[:12]))
    gate = load_gate(gate_folder)
    with pytest.raises(QualityError, match="first is a run of other prompts than those of"):
        run(gate, Renderer(scenes), tmp_path / "second", tmp_path / "first")
    second = run(gate, Renderer(scenes), tmp_path / "second")
    with pytest.raises(QualityError, match="the two results are of different prompts"):
        compare(first, second, 0.01)


def test_a_run_replaces_a_run_and_nothing_else(gate_folder, scenes, tmp_path):
    gate, out = load_gate(gate_folder), tmp_path / "out"
    run(gate, Renderer(scenes), out)
    before = load_run(out).result

    class Failing(Renderer):
        def predict_noise(self, prompt, latents, level):
            raise QualityError("the server is gone")

    with pytest.raises(QualityError, match="the server is gone"):
        run(gate, Failing(scenes), out)
    assert load_run(out).result == before
    run(gate, Renderer(scenes, wrong=1.0), out)
    assert load_run(out).result["score"] < 0.1
    (tmp_path / "papers").mkdir()
    with pytest.raises(QualityError, match="is the reference itself: name another folder"):
        run(gate, Renderer(scenes), out, tmp_path / "papers" / ".." / "out")
    (tmp_path / "papers" / "thesis.txt").write_text("x")
    with pytest.raises(QualityError, match=r"papers is not empty and holds thesis\.txt"):
        run(gate, Renderer(scenes), tmp_path / "papers")
    (tmp_path / "file").write_text("x")
    with pytest.raises(QualityError, match="file is not a folder"):
        run(gate, Renderer(scenes), tmp_path / "file")


def test_damaged_references(gate_folder, scenes, tmp_path):
    gate, first = load_gate(gate_folder), tmp_path / "first"
    run(gate, Renderer(scenes), first)
    with pytest.raises(QualityError, match=r"holds no quality\.json: it is no run"):
        load_run(tmp_path)
    (first / "pictures" / "0003.png").write_bytes(b"not a picture")
    with pytest.raises(QualityError, match=r"0003\.png cannot be read"):
        run(gate, Renderer(scenes), tmp_path / "second", first)
    (first / "pictures" / "0003.png").unlink()
    with pytest.raises(QualityError, match=r"0003\.png cannot be read: No such file"):
        run(gate, Renderer(scenes), tmp_path / "second", first)
    run(gate, Renderer(scenes), first)
    (first / "noise.npz").write_bytes(b"PK")
    with pytest.raises(QualityError, match=r"noise\.npz cannot be read"):
        run(gate, Renderer(scenes), tmp_path / "second", first)
    (first / "noise.npz").unlink()
    assert "noise_cosine" not in run(gate, Renderer(scenes), tmp_path / "second", first)
    np.savez(first / "noise.npz", levels=np.array([0.5]), latents_0=np.zeros((1, 16, 4, 6)))
    with pytest.raises(QualityError, match="is damaged: it has no predicted_0_0"):
        run(gate, Renderer(scenes), tmp_path / "second", first)
    (first / "quality.json").write_text('{"format": 1, "source": "x"}')
    with pytest.raises(QualityError, match="is damaged: it has no prompts"):
        load_run(first)
    (first / "quality.json").write_text('{"format": 0}')
    with pytest.raises(QualityError, match="is not a result of this version"):
        load_run(first)
    (first / "quality.json").write_text("{")
    with pytest.raises(QualityError, match=r"quality\.json cannot be read"):
        load_run(first)


def test_pictures_of_another_size_are_no_reference(gate_folder, scenes, tmp_path):
    gate = load_gate(gate_folder)
    run(gate, Renderer(scenes), tmp_path / "first")
    with pytest.raises(QualityError, match=r"picture .* is 112×144, that of .* 144×112"):
        run(gate, Renderer(scenes[4:] + scenes[:4]), tmp_path / "second", tmp_path / "first")


def test_a_gate_that_judges_nothing_passes_nothing(gate_folder, scenes, tmp_path, capsys):
    gate = rewrite(gate_folder, judge=None)
    run(gate, Renderer(scenes), tmp_path / "first")
    result = run(gate, Renderer(scenes, wrong=1.0), tmp_path / "second", tmp_path / "first")
    assert result["passed"] is None and result["missed"] == []
    command.report(gate, result, tmp_path)
    assert "nothing was judged" in capsys.readouterr().out


def test_few_prompts(gate_folder, scenes, tmp_path, capsys):
    """One picture has no interval, and a handful no verdict."""
    lines = (gate_folder / "prompts.jsonl").read_text().splitlines()
    (gate_folder / "prompts.jsonl").write_text("\n".join(lines[:2]))
    gate = load_gate(gate_folder)
    run(gate, Renderer(scenes), tmp_path / "first")
    result = run(gate, Renderer(scenes, wrong=1.0), tmp_path / "second", tmp_path / "first")
    command.report(gate, result, tmp_path)
    assert "too few prompts to tell" in capsys.readouterr().out
    assert not result["comparison"]["worse"] and not result["comparison"]["decidable"]
    assert result["groups"]["en"]["low"] is None
    assert command.main(["compare", str(tmp_path / "first"), str(tmp_path / "second")]) == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", "--out", "{tmp}/o", "--gate", "{tmp}"], "is no gate"),
        (["run", "--out", "{tmp}/o", "--reference", "{tmp}"], "holds no quality.json"),
        (["run", "--out", "{tmp}/o", "--repository", "{tmp}"], "make export"),
        (["run", "--out", "{tmp}/o", "--server", "127.0.0.1:9"], "no picture for"),
        (["run", "--out", "{tmp}/o", "--server", "http://127.0.0.1:9"], "url must be host:port"),
        (["reference", "--out", "{tmp}/o", "--checkpoint", "{tmp}"], "model_index.json"),
        (["compare", "{tmp}", "{tmp}"], "holds no quality.json"),
    ],
)
def test_the_command_says_what_is_wrong(arguments, sentence, tmp_path, capsys):
    assert command.main([a.format(tmp=tmp_path) for a in arguments]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("quality: ") and sentence in error


def test_what_is_beside_a_run_is_not_lost(gate_folder, scenes, tmp_path):
    gate, out = load_gate(gate_folder), tmp_path / "out"
    run(gate, Renderer(scenes), out)
    (out / "notes.txt").write_text("x")
    with pytest.raises(QualityError, match=r"is not empty and holds notes\.txt: name another"):
        run(gate, Renderer(scenes), out)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "quality.json").write_text('{"mine": 1}')
    with pytest.raises(QualityError, match="is not a result of this version"):
        run(gate, Renderer(scenes), tmp_path / "other")


def test_a_prediction_that_is_not_finite(gate_folder, scenes, tmp_path):
    source = Renderer(scenes, noise=float("nan"))
    with pytest.raises(QualityError, match="the engine is broken: its noise prediction for"):
        run(load_gate(gate_folder), source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
