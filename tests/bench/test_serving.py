from types import SimpleNamespace
from typing import Any

import pytest
import tritonclient.grpc as grpcclient

from bench.serving import ENGINES, engine_seconds


class Client:
    """Says of each model that two requests ran together for a second, and one for half of it."""

    def __init__(self, url: str) -> None: ...

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *error: object) -> None: ...

    def get_inference_statistics(self, model: str, as_json: bool) -> dict[str, Any]:
        batches = [
            {"batch_size": "2", "compute_infer": {"count": "1", "ns": "1000000000"}},
            {"batch_size": "1", "compute_infer": {"count": "1", "ns": "500000000"}},
        ]
        each = {"compute_infer": {"count": "3", "ns": "2500000000"}}
        return {"model_stats": [{"inference_stats": each, "batch_stats": batches}]}


def test_a_batch_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpcclient, "InferenceServerClient", Client)
    server: Any = SimpleNamespace(grpc_url="")
    assert engine_seconds(server) == 1.5 * len(ENGINES)
