from collections.abc import Iterator
from pathlib import Path

import pytest

from serving.server import TritonServer


@pytest.fixture(scope="session")
def server(repository: Path) -> Iterator[TritonServer]:
    """The default repository, served; tests leave it idle and healthy."""
    with TritonServer(repository) as running:
        yield running
