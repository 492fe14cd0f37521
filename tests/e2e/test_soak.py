import asyncio

from bench.soak import soak
from tests.e2e.serving_helpers import metrics
from tests.waiting import wait_until


def test_a_short_soak_fails_nothing_and_leaves_nothing(server):
    """The long version is `python -m bench.soak`."""
    values = asyncio.run(soak(server, requests=60, concurrency=6, seed=1))
    assert values["failed"] == 0, values["failures"]
    assert values["cancelled"] > 0
    assert values["growth_of_total"] < 0.05
    wait_until(lambda: metrics(server.metrics_url)["qwen_image_in_flight"] == 0)
    assert metrics(server.metrics_url)["qwen_image_queued"] == 0
