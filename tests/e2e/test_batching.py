import threading

from tests.e2e.reference import largest_difference
from tests.e2e.serving_helpers import Call, generate, metrics, statistics
from tests.waiting import wait_until


def test_batching_changes_nothing(server):
    """Alone and among others that share its shapes, and so its batches, but nothing else."""
    fields = {"prompt": "a red fox", "height": 64, "width": 64, "seed": 1}
    alone = generate(server.grpc_url, num_inference_steps=20, **fields)
    others = [
        {"prompt": "狐狸", "num_inference_steps": 30},
        {"prompt": "a much longer prompt than the others: " + "fox " * 40},
        {"prompt": "no guidance", "true_cfg_scale": 1.0, "num_inference_steps": 17},
        {"prompt": "strong guidance", "true_cfg_scale": 9.0, "num_inference_steps": 25},
        {"prompt": "", "num_inference_steps": 40},
        {"prompt": "its own negative", "negative_prompt": "snow", "num_inference_steps": 33},
        {"prompt": "two of them", "num_images_per_prompt": 2, "num_inference_steps": 12},
    ]
    before = statistics(server.grpc_url, "dit")
    calls = [
        Call(generate, server.grpc_url, **({"height": 64, "width": 64, "seed": 9} | other))
        for other in others
    ]
    among = generate(server.grpc_url, num_inference_steps=20, **fields)
    for call in calls:
        call.outcome()
    rows, executions = (
        after - start
        for after, start in zip(statistics(server.grpc_url, "dit"), before, strict=True)
    )
    assert rows / executions > 2, "the requests did not share batches: the test shows nothing"
    assert largest_difference(among.images, alone.images) <= 1


def test_a_later_short_request_overtakes_a_long_one(server):
    size = {"height": 128, "width": 128}
    steps = "qwen_image_steps_total"
    before = metrics(server.metrics_url)[steps]
    long = Call(
        generate,
        server.grpc_url,
        prompt="long",
        num_inference_steps=100,
        num_images_per_prompt=2,
        **size,
    )
    wait_until(lambda: metrics(server.metrics_url)[steps] > before)
    short = Call(generate, server.grpc_url, prompt="short", num_inference_steps=4, **size)
    short.outcome()
    assert long.is_alive()
    long.outcome()


def test_eight_requests_in_flight_share_batches(server):
    before = statistics(server.grpc_url, "dit")
    start = threading.Barrier(8)

    def one(number):
        start.wait()
        return generate(
            server.grpc_url,
            prompt=f"prompt {number}",
            height=128,
            width=128,
            num_inference_steps=10,
            seed=number,
        )

    calls = [Call(one, number) for number in range(8)]
    for call in calls:
        call.outcome()
    rows, executions = (
        after - first
        for after, first in zip(statistics(server.grpc_url, "dit"), before, strict=True)
    )
    assert rows == 8 * 10 * 2
    # A request alone makes batches of two rows, the prompt and the negative prompt.
    assert rows / executions > 2 * 1.5
