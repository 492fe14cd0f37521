import pytest

from qwen_image_client import (
    DeadlineExceededError,
    InvalidRequestError,
    QwenImageError,
    RequestCancelledError,
    ServerError,
    ServerUnavailableError,
)
from qwen_image_client.errors import from_status


@pytest.mark.parametrize(
    ("status", "message", "kind", "sentence"),
    [
        ("StatusCode.INVALID_ARGUMENT", "bad height", InvalidRequestError, "bad height"),
        ("400", "bad height", InvalidRequestError, "bad height"),
        (
            "400",
            "prompt: cancelled is no word",
            InvalidRequestError,
            "prompt: cancelled is no word",
        ),
        ("StatusCode.UNAVAILABLE", "queue full", ServerUnavailableError, "queue full"),
        ("503", "queue full", ServerUnavailableError, "queue full"),
        ("StatusCode.CANCELLED", "cancelled by x", RequestCancelledError, "cancelled by x"),
        ("400", "cancelled by x", RequestCancelledError, "cancelled by x"),
        (
            "StatusCode.CANCELLED",
            "deadline of 10 ms exceeded",
            DeadlineExceededError,
            "deadline of 10 ms exceeded",
        ),
        ("400", "deadline of 10 ms exceeded", DeadlineExceededError, "deadline of 10 ms exceeded"),
        ("StatusCode.DEADLINE_EXCEEDED", "late", DeadlineExceededError, "late"),
        ("StatusCode.INTERNAL", "broken", ServerError, "broken (INTERNAL)"),
        ("StatusCode.NOT_FOUND", "no model", ServerError, "no model (NOT_FOUND)"),
        (
            "StatusCode.NOT_FOUND",
            "Request for unknown model: 'qwen_image' has no available versions",
            ServerUnavailableError,
            "the server at host:8001 is not ready: Request for unknown model: 'qwen_image' has "
            "no available versions",
        ),
        ("500", "broken", ServerError, "broken (500)"),
        ("502", "broken", ServerError, "broken (502)"),
    ],
)
@pytest.mark.parametrize("prefix", ["in ensemble 'qwen_image', ", "[request id: 7] "])
def test_status_and_sentence_decide(
    status: str, message: str, kind: type[QwenImageError], sentence: str, prefix: str
) -> None:
    error = from_status(status, prefix + message, "host:8001")
    assert type(error) is kind
    assert str(error) == sentence


def test_unavailable_without_the_service_s_own_sentence_names_the_address() -> None:
    error = from_status("StatusCode.UNAVAILABLE", "connection refused", "host:8001")
    assert str(error) == "the server at host:8001 is unavailable: connection refused"
