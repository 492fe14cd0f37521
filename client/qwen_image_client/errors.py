"""What can go wrong, one class for each thing a caller can do about it."""

import re


class QwenImageError(Exception):
    """Base of every error of this package; its text is one sentence for the user."""


class InvalidRequestError(QwenImageError):
    """The request is wrong: sending it again does not help."""


class ServerUnavailableError(QwenImageError):
    """The server is not reachable, is shutting down or its queue is full: try again later."""


class RequestCancelledError(QwenImageError):
    """The request was cancelled, by this client or by another."""


class DeadlineExceededError(QwenImageError):
    """The image was not ready within the timeout, the request's own or the server's default."""


class ServerError(QwenImageError):
    """The server failed, or its answer cannot be read."""


# What Triton puts before a step's own sentence.
_PREFIXES = re.compile(r"^(?:in ensemble '[^']*', |\[request id: [^\]]*\] )+")
_DEADLINE = re.compile(r"^deadline of \d+ ms exceeded")
_CANCELLED = re.compile(r"^cancelled\b")
# What Triton says of a model that it is loading or, on its way down, has unloaded: NOT_FOUND.
_NOT_THERE_NOW = re.compile(r"has no available versions|is not ready")


def from_status(status: str, message: str, address: str) -> QwenImageError:
    """The error for a failed call.

    status: "StatusCode.<NAME>" of gRPC, or the HTTP status ("400").
    message: what the server or gRPC said.
    address: host:port, named when the sentence is not the service's own.
    """
    sentence = _PREFIXES.sub("", message)
    # Over HTTP Triton (2.51) answers CANCELLED with 400, as it does INVALID_ARG: only the
    # sentence tells them apart.
    if status in ("StatusCode.CANCELLED", "400") and _DEADLINE.match(sentence):
        return DeadlineExceededError(sentence)
    if status == "400" and _CANCELLED.match(sentence):
        return RequestCancelledError(sentence)
    if status in ("StatusCode.NOT_FOUND", "404") and _NOT_THERE_NOW.search(sentence):
        return ServerUnavailableError(f"the server at {address} is not ready: {sentence}")
    if status in ("StatusCode.UNAVAILABLE", "503"):
        if message != sentence:
            return ServerUnavailableError(sentence)
        return ServerUnavailableError(f"the server at {address} is unavailable: {sentence}")
    if status in ("StatusCode.INVALID_ARGUMENT", "400"):
        return InvalidRequestError(sentence)
    if status == "StatusCode.CANCELLED":
        return RequestCancelledError(sentence)
    if status == "StatusCode.DEADLINE_EXCEEDED":
        return DeadlineExceededError(sentence)
    return ServerError(f"{sentence} ({status.removeprefix('StatusCode.')})")
