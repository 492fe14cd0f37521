import asyncio

from bench.soak import soak
from tests.e2e.serving_helpers import metrics
from tests.waiting import wait_until


def test_a_short_soak_fails_nothing_and_leaves_nothing(server):
    """The long version is `python -m bench.soak`. A heap may still settle in one round; what leaks
    grows in every one."""
    growths = []
    while not growths or (growths[-1] >= 0.05 and len(growths) < 3):
        values = asyncio.run(soak(server, requests=60, concurrency=6, seed=len(growths)))
        assert values["failed"] == 0, values["failures"]
        assert values["cancelled"] > 0
        growths.append(values["growth_of_total"])
    assert growths[-1] < 0.05, growths
    wait_until(lambda: metrics(server.metrics_url)["qwen_image_in_flight"] == 0)
    assert metrics(server.metrics_url)["qwen_image_queued"] == 0
