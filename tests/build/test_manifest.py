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


def test_samples_of_another_type_make_it_none(tmp_path):
    file = {"bytes": 6, "sha256": "0" * 64, "sample": None}
    manifest.write(tmp_path, {**MANIFEST, "files": {"model.plan": file}})
    assert manifest.read(tmp_path) is None


def test_samples_reach_from_the_first_byte_to_the_last(tmp_path):
    path = tmp_path / "engine"
    whole = bytearray(3 * 2**20)
    path.write_bytes(whole)
    before = manifest.sample(path)
    for place in (0, len(whole) // 2, len(whole) - 1):
        whole[place] ^= 1
        path.write_bytes(whole)
        assert manifest.sample(path) != before
        whole[place] ^= 1
    path.write_bytes(b"")
    assert manifest.sample(path) != before


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, json.dumps([MANIFEST])])
def test_what_is_no_manifest_at_all(text, tmp_path):
    (tmp_path / manifest.NAME).write_text(text)
    assert manifest.read(tmp_path) is None
