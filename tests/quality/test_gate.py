"""Reading a gate, and what is said of one that is wrong."""

import json
from collections import Counter

import pytest
import yaml

from quality.captions import held_out
from quality.gate import QualityError, load_gate
from quality.prompts import world_prompts
from tests.conftest import ROOT

TINY = ROOT / "quality" / "gates" / "tiny"
PROMPTS = [{"prompt": "a fox", "seed": 1}, {"prompt": "a hen", "seed": 2, "width": 64}]


def write(folder, settings, prompts=PROMPTS):
    (folder / "gate.yaml").write_text(yaml.safe_dump(settings))
    lines = [p if isinstance(p, str) else json.dumps(p) for p in prompts]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    return folder


def test_the_shipped_gate():
    gate = load_gate(TINY)
    assert len(gate.prompts) == 200
    assert all(held_out(prompt.text) for prompt in gate.prompts)
    assert len({prompt.text for prompt in gate.prompts}) == 200
    sizes = Counter((p.fields["width"], p.fields["height"]) for p in gate.prompts)
    assert set(sizes) == {(128, 128), (112, 144), (144, 112)}
    assert min(sizes.values()) >= 66
    assert Counter(p.language for p in gate.prompts) == {"en": 100, "zh": 100}
    assert all(p.fields["num_inference_steps"] == 20 for p in gate.prompts)
    assert gate.at_least == {"score": 0.90, "score_en": 0.85, "score_zh": 0.85}
    assert gate.at_most == {"score_shuffled": 0.35}


def test_the_shipped_prompts_are_those_that_the_script_makes():
    lines = (TINY / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == world_prompts()


def test_a_prompt_s_own_fields_come_first(tmp_path):
    gate = load_gate(write(tmp_path, {"fields": {"width": 32, "height": 48}}))
    assert gate.prompts[0].fields == {"prompt": "a fox", "seed": 1, "width": 32, "height": 48}
    assert gate.prompts[1].fields["width"] == 64
    assert gate.judge is None and gate.reference is None


def test_other_fields_change_the_gate(tmp_path):
    gate = load_gate(write(tmp_path, {"fields": {"num_inference_steps": 20}}))
    assert gate.with_fields(num_inference_steps=20) is gate
    changed = gate.with_fields(num_inference_steps=4)
    assert changed.changed and not gate.changed
    assert {p.fields["num_inference_steps"] for p in changed.prompts} == {4}
    assert changed.prompts_digest == gate.prompts_digest


def test_noise_prompts_are_spread(tmp_path):
    prompts = [{"prompt": str(i), "seed": i} for i in range(10)]
    gate = load_gate(write(tmp_path, {"noise_prompts": 4}, prompts))
    assert gate.noise_indices() == [0, 2, 5, 7]
    gate = load_gate(write(tmp_path, {"noise_prompts": 40}, prompts))
    assert gate.noise_indices() == list(range(10))


@pytest.mark.parametrize(
    ("settings", "prompts", "sentence"),
    [
        ({"fields": {"stpes": 3}}, PROMPTS, r"fields: 'stpes' is unknown: known are"),
        ({"fields": {"widht": 3}}, PROMPTS, r"fields: 'widht' is unknown: did you mean width\?"),
        ({"fields": {"width": 3.5}}, PROMPTS, r"fields: width is 3.5; it must be a whole number"),
        (
            {"fields": {"true_cfg_scale": "4"}},
            PROMPTS,
            "true_cfg_scale is '4'; it must be a number",
        ),
        ({"fields": [1]}, PROMPTS, "fields must hold names and values"),
        ({"judge": "me"}, PROMPTS, "judge is 'me'; it must be 'world' or left out"),
        ({"judge": "world"}, PROMPTS, "prompts.jsonl, line 1: the judge cannot read it"),
        ({"noise_levels": [0]}, PROMPTS, "noise_levels must be a list of numbers above 0, up to 1"),
        ({"noise_prompts": 0}, PROMPTS, "noise_prompts is 0; it must be a number from 1"),
        ({"significance": 1}, PROMPTS, "significance is 1; it must be between 0 and 1"),
        ({"reference": 7}, PROMPTS, "reference is 7; it must be a folder's name"),
        ({"at_least": {"score": "x"}}, PROMPTS, "at_least must hold names of quality.json and"),
        ({"at_lest": {}}, PROMPTS, "'at_lest' is unknown: did you mean at_least"),
        ({"at_least": {"distances.flipp": 1}}, PROMPTS, "did you mean distances.flip"),
        ({"at_least": {"score": 1}}, PROMPTS, "'score' takes a judge, and this gate has none"),
        ({"at_most": {"noise_cosine.lowest": 1}}, PROMPTS, "takes noise_levels"),
        ({"at_most": {"passed": 1}}, PROMPTS, "'passed' is no threshold"),
        ({"significance": float("nan")}, PROMPTS, "significance is nan"),
        (["a"], PROMPTS, "gate.yaml must hold names and values"),
        ({}, ["{"], "prompts.jsonl, line 1 is not JSON"),
        ({}, ["3"], "prompts.jsonl, line 1 must hold names and values"),
        ({}, [*PROMPTS, {"prompt": "x"}], "line 3 has no seed"),
        ({}, [*PROMPTS, {"seed": 1}], "line 3 has no prompt"),
        ({}, [*PROMPTS, {"prompt": 7, "seed": 1}], "line 3: prompt is 7; it must be a text"),
        ({}, [*PROMPTS, {"prompt": "", "seed": True}], "line 3: seed is True; it must be a whole"),
        ({}, PROMPTS[:1], "prompts.jsonl holds 1 prompts; a gate needs at least two"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, settings, prompts, sentence):
    with pytest.raises(QualityError, match=sentence):
        load_gate(write(tmp_path, settings, prompts))


def test_files_that_are_not_there_or_not_readable(tmp_path):
    with pytest.raises(QualityError, match=r"is no gate: .*gate\.yaml is missing"):
        load_gate(tmp_path)
    (tmp_path / "gate.yaml").write_text("judge: [")
    (tmp_path / "prompts.jsonl").write_text("")
    with pytest.raises(QualityError, match="cannot be read: while parsing"):
        load_gate(tmp_path)
    (tmp_path / "gate.yaml").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(QualityError, match="cannot be read"):
        load_gate(tmp_path)
