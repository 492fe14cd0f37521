import shutil

from serving.server import TritonServer
from tests.e2e.serving_helpers import SMALL, generate


def test_a_repository_is_served_wherever_it_was_moved(repository, server, tmp_path):
    """Also from a path with a space and letters beyond ASCII, which Triton's stubs do not take."""
    moved = tmp_path / "another place, así"
    shutil.copytree(repository, moved)
    with TritonServer(moved) as running:
        there = generate(running.grpc_url, prompt="x", **SMALL)
    assert there.encoded == generate(server.grpc_url, prompt="x", **SMALL).encoded
