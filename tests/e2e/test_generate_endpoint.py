import base64
import io
import json
import subprocess

from PIL import Image

from tests.e2e.serving_helpers import metrics


def curl(url, body):
    return subprocess.run(
        ["curl", "-s", "-w", "\n%{http_code}", url, "-d", json.dumps(body)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout.rsplit("\n", 1)


def test_plain_curl_gets_a_picture(server):
    url = f"http://{server.http_url}/v2/models/qwen_image/generate"
    body = {
        "prompt": "a red fox",
        "num_inference_steps": 2,
        "height": 48,
        "width": 64,
        "seed": 3,
        "output_format": "webp",
        "response_format": "b64",
    }
    answer, status = curl(url, body)
    assert status == "200"
    data = json.loads(answer)
    picture = Image.open(io.BytesIO(base64.b64decode(data["generated_image"])))
    assert (picture.format, picture.size) == ("WEBP", (64, 48))
    assert data["seeds"] == 3
    metadata = json.loads(data["metadata"])
    assert metadata["num_inference_steps"] == 2
    assert set(metadata["stages_ms"]) == {
        "queue", "encode", "modulation", "denoise", "decode", "pack"
    }  # fmt: skip


def test_a_misspelt_field_in_the_json_is_refused(server):
    url = f"http://{server.http_url}/v2/models/qwen_image/generate"
    answer, status = curl(url, {"prompt": "x", "steps": 3})
    assert status == "400"
    assert "'steps': did you mean 'num_inference_steps'" in json.loads(answer)["error"]


def test_the_metrics_of_the_interface_are_there(server):
    names = {name.split("{")[0] for name in metrics(server.metrics_url)}
    for name in (
        "requests_total",
        "stage_seconds_bucket",
        "stage_seconds_sum",
        "stage_seconds_count",
        "steps_total",
        "in_flight",
        "queued",
        "cache_hits_total",
        "cache_misses_total",
        "cache_evictions_total",
        "cache_bytes",
    ):
        assert f"qwen_image_{name}" in names
    stages = {
        name for name in metrics(server.metrics_url) if "stage_seconds_count" in name
    }  # fmt: skip
    assert len(stages) == 6
