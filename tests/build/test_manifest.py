"""A manifest that was edited is none: nothing reads half of one."""

import json

import pytest

from build import manifest

MANIFEST = {
    "format": manifest.FORMAT,
    "profile": "b300",
    "inputs": "c0ffee",
    "checkpoint": {"fingerprint": "c0ffee"},
    "versions": {},
    "engines": {
        "modulation": {"artifact": "model.onnx", "precision": "fp32"},
        "dit": {
            "artifact": "model.rtx",
            "precision": "fp8",
            "library": "tensorrt_rtx",
            "version": "1.5.0.1",
            "target": "sm120",
            "device": None,
            "made_from": {"checkpoint": "c0ffee", "recipe": "decade"},
        },
    },
    "files": {"config.pbtxt": {"bytes": 6, "sha256": "0" * 64}},
}


def test_a_whole_manifest_is_read(tmp_path):
    manifest.write(tmp_path, MANIFEST)
    assert manifest.read(tmp_path) == MANIFEST


@pytest.mark.parametrize("value", [None, [], 3, {"a": None}, {"a": 3}, {"a": {}}])
@pytest.mark.parametrize("field", [name for name in MANIFEST if name != "versions"])
def test_a_manifest_with_a_field_of_another_type_is_none(field, value, tmp_path):
    manifest.write(tmp_path, {**MANIFEST, field: value})
    assert manifest.read(tmp_path) is None


@pytest.mark.parametrize("field", ["artifact", "precision", "version", "target", "made_from"])
def test_an_engine_that_lacks_a_field_makes_it_none(field, tmp_path):
    engine = {k: v for k, v in MANIFEST["engines"]["dit"].items() if k != field}
    manifest.write(tmp_path, {**MANIFEST, "engines": {"dit": engine}})
    assert manifest.read(tmp_path) is None


@pytest.mark.parametrize("field", ["verified", "made_from", "device"])
def test_an_engine_with_a_field_of_another_type_makes_it_none(field, tmp_path):
    engine = MANIFEST["engines"]["dit"] | {field: 3}
    manifest.write(tmp_path, {**MANIFEST, "engines": {"dit": engine}})
    assert manifest.read(tmp_path) is None


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, json.dumps([MANIFEST])])
def test_what_is_no_manifest_at_all(text, tmp_path):
    (tmp_path / manifest.NAME).write_text(text)
    assert manifest.read(tmp_path) is None
