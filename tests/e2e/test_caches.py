import uuid

import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from serving.server import TritonServer
from tests.e2e.serving_helpers import (
    SMALL,
    Call,
    generate,
    metrics,
    parameter,
    statistics,
    variant,
)


def fresh(text="prompt"):
    return f"{text} {uuid.uuid4()}"


def test_a_repeated_prompt_does_not_run_the_text_encoder(server):
    prompt, negative = fresh(), fresh("negative")
    first = generate(server.grpc_url, prompt=prompt, negative_prompt=negative, **SMALL)
    assert first.metadata["cache"]["prompt"] == "miss"
    assert first.metadata["cache"]["negative_prompt"] == "miss"
    before = statistics(server.grpc_url, "text_encoder")
    fields = SMALL | {"seed": 2, "height": 96, "num_inference_steps": 3, "true_cfg_scale": 2.0}
    again = generate(server.grpc_url, prompt=prompt, negative_prompt=negative, **fields)
    swapped = generate(server.grpc_url, prompt=negative, negative_prompt=prompt, **fields)
    assert statistics(server.grpc_url, "text_encoder") == before
    for response in (again, swapped):
        assert response.metadata["cache"]["prompt"] == "hit"
        assert response.metadata["cache"]["negative_prompt"] == "hit"


def test_eight_simultaneous_equal_prompts_run_it_once(server):
    prompt = fresh()
    generate(server.grpc_url, prompt=fresh(), **SMALL)  # the default negative prompt is cached now
    before, _ = statistics(server.grpc_url, "text_encoder")
    calls = [
        Call(generate, server.grpc_url, prompt=prompt, **(SMALL | {"seed": seed}))
        for seed in range(8)
    ]
    for call in calls:
        call.outcome()
    assert statistics(server.grpc_url, "text_encoder")[0] - before == 1


def test_a_cached_prompt_gives_the_same_picture(server):
    prompt = fresh()
    first = generate(server.grpc_url, prompt=prompt, **SMALL)
    assert generate(server.grpc_url, prompt=prompt, **SMALL).encoded == first.encoded


def test_the_modulation_of_a_schedule_is_computed_once(server):
    fields = SMALL | {"height": 112, "width": 80, "num_inference_steps": 13}
    generate(server.grpc_url, prompt="x", **fields)
    before = statistics(server.grpc_url, "modulation")
    again = generate(server.grpc_url, prompt="y", **fields)
    assert statistics(server.grpc_url, "modulation") == before
    assert again.metadata["cache"]["modulation_hits"] == 13


@pytest.fixture(scope="module")
def small_cache_server(repository, tmp_path_factory):
    changes = [
        parameter("encoder_cache_bytes", "268435456", "20000"),
        parameter("modulation_cache_bytes", "1073741824", "50000"),
    ]
    small = variant(
        repository,
        tmp_path_factory.mktemp("small_cache") / "repository",
        {"denoise/config.pbtxt": changes},
    )
    with TritonServer(small) as running:
        yield running


def test_the_byte_bounds_hold_under_many_different_prompts(small_cache_server):
    url = small_cache_server.grpc_url
    for number in range(100):
        # A size of its own every now and then brings another schedule.
        size = 16 * (1 + number % 5)
        generate(
            url, prompt=f"prompt {number}", height=size, width=16, num_inference_steps=3, seed=1
        )
        values = metrics(small_cache_server.metrics_url)
        assert values['qwen_image_cache_bytes{cache="encoder"}'] <= 20_000
        assert values['qwen_image_cache_bytes{cache="modulation"}'] <= 50_000
    assert values['qwen_image_cache_evictions_total{cache="encoder"}'] > 50
    assert values['qwen_image_cache_misses_total{cache="encoder"}'] >= 100


def test_a_failing_encoder_leaves_nothing_behind(repository, tmp_path):
    """A text encoder that fails on demand takes the engine's place."""
    broken = variant(
        repository,
        tmp_path / "repository",
        {"text_encoder/config.pbtxt": [('backend: "engine"', 'backend: "python"')]},
    )
    (broken / "model_repository/text_encoder/1/model.py").write_text(
        "import pathlib\n"
        "import numpy as np\n"
        "import triton_python_backend_utils as pb_utils\n"
        f"SWITCH = pathlib.Path({str(tmp_path / 'fail')!r})\n"
        "class TritonPythonModel:\n"
        "    def execute(self, requests):\n"
        "        return [self.answer(request) for request in requests]\n"
        "    def answer(self, request):\n"
        "        if SWITCH.exists():\n"
        "            return pb_utils.InferenceResponse(error=pb_utils.TritonError('no memory'))\n"
        "        ids = pb_utils.get_input_tensor_by_name(request, 'input_ids').as_numpy()\n"
        "        states = np.repeat(ids[:, 34:, None].astype(np.float32) / 1000, WIDTH, axis=2)\n"
        "        return pb_utils.InferenceResponse([pb_utils.Tensor('hidden_states', states)])\n"
        "WIDTH = 96\n".replace("96", str(text_width(repository)))
    )
    with TritonServer(broken) as running:
        url, prompt = running.grpc_url, fresh()
        (tmp_path / "fail").touch()
        for _ in range(3):
            with pytest.raises(InferenceServerException, match="'text_encoder' failed: no memory"):
                generate(url, prompt=prompt, **SMALL)
        values = metrics(running.metrics_url)
        assert values['qwen_image_cache_bytes{cache="encoder"}'] == 0
        assert values['qwen_image_requests_total{outcome="error"}'] == 3
        assert values["qwen_image_in_flight"] == 0
        (tmp_path / "fail").unlink()
        assert generate(url, prompt=prompt, **SMALL).metadata["cache"]["prompt"] == "miss"
        with grpcclient.InferenceServerClient(url) as client:
            assert client.is_server_ready()


def text_width(repository):
    import json

    manifest = json.loads((repository / "manifest.json").read_text())
    return manifest["engines"]["text_encoder"]["outputs"]["hidden_states"]["shape"][-1]
