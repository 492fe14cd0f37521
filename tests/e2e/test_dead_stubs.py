import os
import re
import signal
import subprocess
import sys
import time

import pytest
from tritonclient.utils import InferenceServerException

from serving.processes import descendants
from serving.server import TritonServer
from tests.conftest import ROOT
from tests.e2e.serving_helpers import SMALL, Call, generate

LONG = {"height": 256, "width": 256, "num_inference_steps": 100}


@pytest.fixture(scope="module")
def service(repository, tmp_path_factory):
    """`make serve` as an operator runs it; yields (gRPC url, process)."""
    log = tmp_path_factory.mktemp("service") / "log"
    chosen = TritonServer(repository)  # only to choose free ports
    command = [sys.executable, "-m", "serving", "--repository", str(repository)]
    command += ["--profile", "cpu", "--host", "127.0.0.1"]
    command += ["--http-port", str(chosen.http_port), "--grpc-port", str(chosen.grpc_port)]
    command += ["--metrics-port", str(chosen.metrics_port)]
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
    try:
        wait_for_a_picture(chosen.grpc_url, 60)
        yield chosen.grpc_url, process, log
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=15) == 0
    finally:
        process.kill()


def wait_for_a_picture(url, timeout):
    deadline = time.monotonic() + timeout
    while True:
        try:
            return generate(url, prompt="x", **SMALL)
        except InferenceServerException:
            assert time.monotonic() < deadline, f"no picture within {timeout} s"
            time.sleep(0.3)


def stub_of(process, model):
    for child in descendants(process.pid):
        command = " ".join(child.cmdline())
        if "triton_python_backend_stub" in command and re.search(rf"\b{model}\b", command):
            return child.pid
    raise AssertionError(f"no stub of {model}")


@pytest.mark.parametrize("model", ["denoise", "dit", "tokenize"])
def test_a_killed_stub_answers_everyone_and_the_service_comes_back(service, model):
    url, process, log = service
    calls = [Call(generate, url, prompt=f"p{number}", **LONG) for number in range(3)]
    time.sleep(1)
    os.kill(stub_of(process, model), signal.SIGKILL)
    killed = time.monotonic()
    for call in calls:
        with pytest.raises(InferenceServerException):
            call.outcome(timeout=10)
        assert call.ended_at - killed < 10
    wait_for_a_picture(url, 60 - (time.monotonic() - killed))
    assert model in log.read_text()
