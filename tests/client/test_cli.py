from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from qwen_image_client import Protocol
from qwen_image_client.bench import make_prompts
from qwen_image_client.cli import main
from tests.starting import INTERRUPTIBLE

from .fake_server import FakeServer

CLIENT = Path(__file__).parents[2] / "client"


def at(server: FakeServer, protocol: Protocol) -> list[str]:
    return ["--url", server.urls[protocol], "--protocol", protocol]


def test_generate_writes_one_file(
    server: FakeServer, protocol: Protocol, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "fox.png"
    assert main(["generate", "fox", "-o", str(path), "--seed", "5", *at(server, protocol)]) == 0
    with Image.open(path) as image:
        assert (image.format, image.size) == ("PNG", (16, 16))
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"{path}  seed 5"
    assert second.endswith(" s")


def test_generate_numbers_several_files_in_the_format_of_the_name(
    server: FakeServer, tmp_path: Path
) -> None:
    arguments = ["generate", "fox", "-o", str(tmp_path / "fox.webp"), "--timeout", "30"]
    arguments += ["--num-images-per-prompt", "2", "--height", "16", "--width", "16"]
    arguments += ["--num-inference-steps", "2", "--true-cfg-scale", "1.5"]
    arguments += ["--negative-prompt", "blur", *at(server, "grpc")]
    assert main(arguments) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fox-1.webp", "fox-2.webp"]
    with Image.open(tmp_path / "fox-2.webp") as image:
        assert image.format == "WEBP"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["error INVALID_ARG height must be even, got 7"], "height must be even, got 7"),
        (["fox", "-o", "fox.gif"], "fox.gif must end in one of .png, .jpg, .jpeg, .webp"),
        (
            ["fox", "-o", "fox.png", "--output-format", "jpeg"],
            "fox.png does not fit --output-format jpeg",
        ),
        (["fox", "-o", "nowhere/fox.png"], "the folder of nowhere/fox.png does not exist"),
    ],
)
def test_errors_are_one_sentence(
    server: FakeServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["generate", *arguments, *at(server, "grpc")]) == 1
    captured = capsys.readouterr()
    assert captured.err == f"qwen-image: {sentence}\n"
    assert captured.out == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("short_pauses")
@pytest.mark.parametrize("command", [["generate", "fox"], ["status"], ["bench"]])
def test_an_unreachable_server_is_one_sentence(
    protocol: Protocol,
    dead_address: str,
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*command, "--url", dead_address, "--protocol", protocol]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"qwen-image: the server at {dead_address} is ")
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("command", "protocol"),
    [(["generate", "fox"], "grpc"), (["generate", "fox"], "http"), (["bench"], "grpc")],
)
def test_ctrl_c_cancels_at_the_server_and_exits_with_130(
    server: FakeServer, command: list[str], protocol: Protocol, tmp_path: Path, request_id: str
) -> None:
    negative_prompt = f"sleep 30 {request_id}"
    process = subprocess.Popen(
        [
            *INTERRUPTIBLE,
            *(sys.executable, "-m", "qwen_image_client", *command),
            *("--negative-prompt", negative_prompt, *at(server, protocol)),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(CLIENT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    sent = server.id_of(negative_prompt)
    process.send_signal(signal.SIGINT)
    output, error = process.communicate(timeout=10)
    assert process.returncode == 130
    assert error == "qwen-image: interrupted, requests under way were cancelled\n"
    assert output == ""
    assert server.cancelled(sent)


def test_status(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--metrics-url", server.metrics_url, *at(server, "http")]) == 0
    output = capsys.readouterr().out
    assert output.startswith("Triton 2.")
    assert "ready" in output.splitlines()[0]
    assert "denoise" in output
    assert 'qwen_image_requests_total{outcome="ok"} ' in output
    assert "READY" in output


def test_status_as_json(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--json", *at(server, "grpc")]) == 0
    status = json.loads(capsys.readouterr().out)
    assert status["ready"] is True
    assert {model["name"] for model in status["models"]} == {"qwen_image", "denoise"}


def test_bench_report(
    server: FakeServer,
    protocol: Protocol,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "report.json"
    arguments = ["bench", "--requests", "12", "--concurrency", "4", "--warmup", "2"]
    arguments += ["--num-images-per-prompt", "2", "--seed", "1", "--json", str(path)]
    assert main([*arguments, *at(server, protocol)]) == 0
    report = json.loads(path.read_text())
    assert set(report) == {
        *("protocol", "triton_version", "requests", "concurrency", "warmup", "seed"),
        *("repeat_prompt", "fields", "succeeded", "success_rate", "errors", "seconds"),
        *("images", "images_per_second", "latency_seconds", "stages"),
    }
    assert report["fields"] == {"num_images_per_prompt": 2}
    assert (report["succeeded"], report["success_rate"], report["images"]) == (12, 1.0, 24)
    assert report["images_per_second"] == pytest.approx(24 / report["seconds"])
    latency = report["latency_seconds"]
    assert latency["min"] <= latency["p50"] <= latency["p95"] <= latency["p99"] <= latency["max"]
    assert list(report["stages"]) == [
        *("queue", "encode", "modulation", "denoise", "decode", "pack", "other"),
    ]
    assert sum(stage["share"] for stage in report["stages"].values()) == pytest.approx(1.0)
    output = capsys.readouterr().out
    assert output.startswith("12 of 12 requests succeeded (100.0%), 24 images in ")
    assert "P99" in output


def test_bench_counts_refusals_and_does_not_retry(
    server: FakeServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def prompts(count: int, seed: int, repeat: bool) -> list[str]:
        return ["fox", "error UNAVAILABLE queue full"] * (count // 2)

    monkeypatch.setattr("qwen_image_client.bench.make_prompts", prompts)
    path = tmp_path / "report.json"
    arguments = ["bench", "--requests", "4", "--warmup", "0", "--json", str(path)]
    assert main([*arguments, *at(server, "grpc")]) == 0
    report = json.loads(path.read_text())
    assert report["success_rate"] == 0.5
    assert report["errors"] == {"ServerUnavailableError": {"count": 2, "first": "queue full"}}
    assert "2 x ServerUnavailableError: queue full" in capsys.readouterr().out


def test_bench_fails_when_nothing_succeeds(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bench", "--requests", "2", "--warmup", "0", "--repeat-prompt"]
    arguments += ["--negative-prompt", "error INTERNAL it broke", *at(server, "http")]
    assert main(arguments) == 1
    assert "2 x ServerError: it broke" in capsys.readouterr().out


def test_a_failing_warm_up_is_one_sentence(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bench", "--negative-prompt", "error INVALID_ARG height is odd"]
    assert main([*arguments, *at(server, "grpc")]) == 1
    assert capsys.readouterr().err == "qwen-image: height is odd\n"


def test_bench_prompts_differ_unless_repeated() -> None:
    prompts = make_prompts(1000, seed=1, repeat=False)
    assert len(set(prompts)) == 1000
    assert not set(prompts) & set(make_prompts(1000, seed=2, repeat=False))
    assert prompts == make_prompts(1000, seed=1, repeat=False)
    assert len(set(make_prompts(1000, seed=1, repeat=True))) == 1


@pytest.mark.parametrize("arguments", [[], ["paint"], ["bench", "--requests", "0"]])
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
