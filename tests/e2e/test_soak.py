import asyncio

from bench.soak import soak
from tests.e2e.serving_helpers import metrics
from tests.waiting import wait_until


def test_a_short_soak_fails_nothing_and_leaves_nothing(server):
    """The long version is `python -m bench.soak`. A heap may still settle in one round; what leaks
    grows in every one, by as much of what the first began with."""
    growths = []
    for seed in range(1, 4):
        values = asyncio.run(soak(server, requests=60, concurrency=6, seed=seed))
        assert values["failed"] == 0, values["failures"]
        assert values["cancelled"] > 0
        if not growths:
            first = sum(values["bytes_after_warm_up"].values())
        growths.append(sum(values["growth_bytes"].values()) / first)
        if growths[-1] < 0.05:
            break
    assert growths[-1] < 0.05, growths
    wait_until(lambda: metrics(server.metrics_url)["qwen_image_in_flight"] == 0)
    assert metrics(server.metrics_url)["qwen_image_queued"] == 0
