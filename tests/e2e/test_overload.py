import time

import pytest
from tritonclient.utils import InferenceServerException

from serving.server import TritonServer
from tests.e2e.serving_helpers import Call, generate, held, metrics, parameter, variant
from tests.waiting import wait_until


@pytest.fixture
def tight_server(repository, tmp_path):
    """Four requests in flight, eight behind them."""
    changes = [parameter("max_in_flight", "8", "4"), parameter("max_queued", "64", "8")]
    tight = variant(repository, tmp_path / "repository", {"denoise/config.pbtxt": changes})
    with TritonServer(tight) as running:
        yield running


def storm(server, count, **fields):
    size = {"height": 128, "width": 128, "num_inference_steps": 8}
    return [
        Call(generate, server.grpc_url, prompt=f"p{n}", seed=n, **(size | fields))
        for n in range(count)
    ]


def outcomes(calls):
    """How many gave a picture, how many UNAVAILABLE; anything else fails."""
    served = refused = 0
    for call in calls:
        try:
            assert len(call.outcome(timeout=120).images) == 1
            served += 1
        except InferenceServerException as error:
            assert error.status() == "StatusCode.UNAVAILABLE", error
            refused += 1
    return served, refused


def test_forty_at_once_give_pictures_and_unavailable_and_nothing_hangs(tight_server):
    served, refused = outcomes(storm(tight_server, 40))
    assert served >= 12
    assert refused > 0
    assert served + refused == 40
    values = metrics(tight_server.metrics_url)
    assert values['qwen_image_requests_total{outcome="ok"}'] == served
    assert values['qwen_image_requests_total{outcome="unavailable"}'] == refused
    assert values["qwen_image_in_flight"] == values["qwen_image_queued"] == 0
    assert outcomes(storm(tight_server, 1)) == (1, 0)


def test_the_refusal_says_what_the_limits_are(tight_server):
    with held(tight_server, "dit"):  # however fast one runs, and however late another comes
        calls = storm(tight_server, 12)
        wait_until(lambda: metrics(tight_server.metrics_url)["qwen_image_queued"] == 8, timeout=30)
        (extra,) = storm(tight_server, 1)
        with pytest.raises(
            InferenceServerException, match="4 requests are running and 8 are waiting"
        ):
            extra.outcome()
    assert outcomes(calls) == (12, 0)


def test_sigterm_under_load_answers_everyone_and_ends_within_ten_seconds(tight_server):
    calls = storm(tight_server, 12, num_inference_steps=100)
    wait_until(lambda: metrics(tight_server.metrics_url)["qwen_image_in_flight"] == 4, timeout=30)
    started = time.monotonic()
    tight_server.stop(timeout=10)
    assert time.monotonic() - started < 10
    served, refused = outcomes(calls)
    assert served + refused == 12
