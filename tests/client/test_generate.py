"""Requests, answers, errors and retries, over both protocols against a real Triton server."""

from __future__ import annotations

import asyncio
import time
import uuid

import pytest

from qwen_image_client import (
    AsyncClient,
    Client,
    DeadlineExceededError,
    InvalidRequestError,
    Protocol,
    QwenImageError,
    RequestCancelledError,
    ServerError,
    ServerUnavailableError,
)

from .fake_server import FakeServer
from .relay import Relay


def test_every_field_reaches_the_server(
    client: Client, server: FakeServer, request_id: str
) -> None:
    client.generate(
        "狐狸 🦊",
        negative_prompt="blur",
        num_inference_steps=20,
        true_cfg_scale=2.5,
        height=512,
        width=768,
        seed=2**53,
        num_images_per_prompt=2,
        output_format="webp",
        timeout=30,
        request_id=request_id,
    )
    (request,) = [e for e in server.journal(request_id) if e["event"] == "request"]
    assert request["tensors"] == {
        "prompt": ["object", [1], "狐狸 🦊"],
        "negative_prompt": ["object", [1], "blur"],
        "num_inference_steps": ["int32", [1], 20],
        "true_cfg_scale": ["float32", [1], 2.5],
        "height": ["int32", [1], 512],
        "width": ["int32", [1], 768],
        "seed": ["int64", [1], 2**53],
        "num_images_per_prompt": ["int32", [1], 2],
        "output_format": ["object", [1], "webp"],
    }
    assert 29e6 < request["timeout_us"] <= 30e6
    assert request["parameters"] == {}


def test_unset_fields_are_not_sent(client: Client, server: FakeServer) -> None:
    answer = client.generate("fox")
    assert uuid.UUID(answer.request_id).version == 4
    (request,) = [e for e in server.journal(answer.request_id) if e["event"] == "request"]
    assert request["tensors"] == {"prompt": ["object", [1], "fox"]}
    assert request["timeout_us"] == 0


@pytest.mark.parametrize("output_format", ["png", "jpeg", "webp"])
def test_the_answer(client: Client, output_format: str, request_id: str) -> None:
    answer = client.generate(
        "fox", seed=5, num_images_per_prompt=3, output_format=output_format, request_id=request_id
    )
    assert answer.seeds == [5, 6, 7]
    assert answer.request_id == answer.metadata["request_id"] == request_id
    assert [(image.format, image.size) for image in answer.images] == [
        (output_format.upper(), (16, 16))
    ] * 3
    assert len(set(answer.encoded)) == 3


def test_an_image_far_above_grpc_s_default_limit(client: Client) -> None:
    answer = client.generate("pixels 2048")
    assert len(answer.encoded[0]) > 12e6
    assert answer.images[0].size == (2048, 2048)


@pytest.mark.parametrize("protocol", ["http"])
def test_http_does_not_ask_for_compression(relay: Relay, protocol: Protocol) -> None:
    with Client(relay.address, protocol) as client:
        client.generate("fox")
    assert b"Accept-Encoding: identity" in relay.sent


def test_an_unreadable_image_is_a_server_error(client: Client) -> None:
    answer = client.generate("garbage")
    assert answer.encoded == [b"no image"]
    with pytest.raises(ServerError, match=r"^image 1 of 1 cannot be decoded"):
        _ = answer.images


@pytest.mark.parametrize(
    ("code", "sentence", "kind"),
    [
        ("INVALID_ARG", "height must be a multiple of 16, got 7", InvalidRequestError),
        ("CANCELLED", "cancelled by a client", RequestCancelledError),
        ("CANCELLED", "deadline of 9 ms exceeded", DeadlineExceededError),
        ("INTERNAL", "it broke", ServerError),
        ("NOT_FOUND", "it is gone", ServerError),
    ],
)
def test_other_errors_are_typed_and_never_retried(
    client: Client,
    server: FakeServer,
    request_id: str,
    code: str,
    sentence: str,
    kind: type[QwenImageError],
) -> None:
    with pytest.raises(QwenImageError) as caught:
        client.generate(f"error {code} {sentence}", request_id=request_id)
    assert type(caught.value) is kind
    assert str(caught.value).startswith(sentence)
    assert [e["event"] for e in server.journal(request_id)] == ["request", "answer"]


def test_unavailable_is_retried_with_the_same_fields_and_id(
    client: Client, server: FakeServer, request_id: str
) -> None:
    answer = client.generate("refuse 2 queue full", seed=5, timeout=30, request_id=request_id)
    assert answer.seeds == [5]
    entries = server.journal(request_id)
    assert [e["event"] for e in entries] == [
        *("request", "answer", "cancel"),
        *("request", "answer", "cancel"),
        *("request", "answer"),
    ]
    requests = [e for e in entries if e["event"] == "request"]
    assert requests[0]["tensors"] == requests[1]["tensors"] == requests[2]["tensors"]
    # What is left of the timeout shrinks with every attempt.
    timeouts = [request["timeout_us"] for request in requests]
    assert timeouts == sorted(timeouts, reverse=True)
    assert len(set(timeouts)) == 3


def test_retries_are_bounded(server: FakeServer, protocol: Protocol, request_id: str) -> None:
    with (
        Client(server.urls[protocol], protocol, retries=2) as client,
        pytest.raises(ServerUnavailableError) as caught,
    ):
        client.generate("refuse 99 queue full", request_id=request_id)
    assert str(caught.value) == "queue full (3 attempts)"
    assert server.count(request_id, "request") == 3


def test_retries_end_within_the_timeout(server: FakeServer, protocol: Protocol) -> None:
    with Client(server.urls[protocol], protocol, retries=100) as client:
        begin = time.monotonic()
        with pytest.raises(ServerUnavailableError, match="queue full"):
            client.generate("refuse 99 queue full", timeout=0.8)
        assert time.monotonic() - begin < 10


def test_an_id_in_flight_is_refused(client: Client, request_id: str) -> None:
    handle = client.submit("sleep 30", request_id=request_id)
    with pytest.raises(InvalidRequestError, match="request_id must be new"):
        client.generate("fox", request_id=request_id)
    assert handle.cancel()


def test_requests_of_one_client_overlap(server: FakeServer, protocol: Protocol) -> None:
    async def run() -> float:
        async with AsyncClient(server.urls[protocol], protocol) as client:
            begin = time.monotonic()
            await asyncio.gather(*(client.generate("sleep 0.5") for _ in range(12)))
            return time.monotonic() - begin

    assert asyncio.run(run()) < 2.0


def test_a_closed_client_says_so(server: FakeServer, protocol: Protocol) -> None:
    client = Client(server.urls[protocol], protocol)
    client.close()
    client.close()
    with pytest.raises(QwenImageError, match=r"^the client is closed$"):
        client.generate("fox")


@pytest.mark.parametrize(
    ("url", "protocol", "sentence"),
    [
        ("http://localhost:8000", "grpc", "url must be host:port or grpc://host:port"),
        ("https://localhost", "http", "url must be host:port or http://host:port"),
        ("localhost:8000", "rest", "protocol must be 'grpc' or 'http', got 'rest'"),
    ],
)
def test_wrong_urls_are_refused(url: str, protocol: Protocol, sentence: str) -> None:
    with pytest.raises(InvalidRequestError, match=sentence):
        Client(url, protocol)


def test_a_url_may_name_its_protocol(server: FakeServer, protocol: Protocol) -> None:
    with Client(f"{protocol}://{server.urls[protocol]}/", protocol) as client:
        assert client.server_ready()


def test_http_to_the_grpc_port_says_so(server: FakeServer) -> None:
    with (
        Client(server.urls["grpc"], "http") as client,
        pytest.raises(ServerError, match="does not speak HTTP: is it the gRPC port"),
    ):
        client.generate("fox")


def test_grpc_to_the_http_port_is_unavailable(server: FakeServer) -> None:
    with (
        Client(server.urls["http"], "grpc", retries=0) as client,
        pytest.raises(ServerUnavailableError),
    ):
        client.generate("fox")


def test_status(client: Client, server: FakeServer) -> None:
    client.generate("fox")
    assert client.server_ready()
    status = client.status()
    assert status.ready
    assert status.triton_version.startswith("2.")
    assert [(m.name, m.version, m.state) for m in status.models] == [
        ("denoise", "1", "READY"),
        ("qwen_image", "1", "READY"),
    ]
    assert all(m.succeeded > 0 and m.mean_ms is not None for m in status.models)
    assert status.metrics == {}
    metrics = client.status(server.metrics_url).metrics
    assert list(metrics) == ['qwen_image_requests_total{outcome="ok"}']
    assert metrics['qwen_image_requests_total{outcome="ok"}'] >= 1
    with pytest.raises(ServerUnavailableError, match="cannot be read"):
        client.status("http://127.0.0.1:9/metrics")
