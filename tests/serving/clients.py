"""A plain HTTP client of the test models."""

import http.client
import json
import threading
import time


def infer(url: str, model: str, milliseconds: int, timeout: float = 30.0) -> float:
    """Lets `model` sleep; returns what it answers, and raises OSError or HTTPException if it
    does not."""
    connection = http.client.HTTPConnection(url, timeout=timeout)
    tensor = {"name": "milliseconds", "shape": [1], "datatype": "INT32", "data": [milliseconds]}
    try:
        connection.request("POST", f"/v2/models/{model}/infer", json.dumps({"inputs": [tensor]}))
        answer = json.loads(connection.getresponse().read())
    finally:
        connection.close()
    if "error" in answer:
        raise http.client.HTTPException(answer["error"])
    return float(answer["outputs"][0]["data"][0])


class Waiting:
    """A request in a thread of its own."""

    def __init__(self, url: str, model: str, milliseconds: int) -> None:
        self.value: float | None = None
        self.error: Exception | None = None
        self.ended = 0.0  # time.monotonic()
        self._thread = threading.Thread(target=self._run, args=(url, model, milliseconds))
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def _run(self, url: str, model: str, milliseconds: int) -> None:
        try:
            self.value = infer(url, model, milliseconds)
        except (OSError, http.client.HTTPException) as error:
            self.error = error
        self.ended = time.monotonic()
