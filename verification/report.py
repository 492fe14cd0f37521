"""report.json and report.md: what was checked where, and what came out."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from export.files import write_whole

REPORT = "report"


def machine() -> dict[str, Any]:
    return {
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "gpus": [
            {
                "name": torch.cuda.get_device_name(number),
                "sm": "sm{}{}".format(*torch.cuda.get_device_capability(number)),
            }
            for number in range(torch.cuda.device_count())
        ],
    }


def write_report(folder: Path, report: dict[str, Any]) -> Path:
    """Writes both files; returns the one to read. Raises OSError."""
    text = json.dumps(report, indent=1, ensure_ascii=False)
    write_whole(folder / f"{REPORT}.json", (text + "\n").encode())
    path = folder / f"{REPORT}.md"
    write_whole(path, ("\n".join(_lines(report)) + "\n").encode())
    return path


def _lines(report: dict[str, Any]) -> Iterator[str]:
    checkpoint, speed = report["checkpoint"], report["speed"]
    yield f"# {checkpoint['name']} with the profile {report['profile']}"
    yield ""
    yield f"{'Passed' if report['passed'] else '**Not passed**'}, {report['date']}."
    yield from (f"- {sentence}" for sentence in report["missed"])
    yield ""
    yield "| | |"
    yield "|---|---|"
    gpus = ", ".join(f"{gpu['name']} ({gpu['sm']})" for gpu in report["machine"]["gpus"])
    yield f"| GPU | {gpus or 'none'} |"
    yield f"| system | {report['machine']['system']}, {report['machine']['cores']} cores |"
    yield f"| checkpoint | {checkpoint['fingerprint']} |"
    yield f"| versions | {', '.join(f'{k} {v}' for k, v in report['versions'].items())} |"
    yield f"| reference | diffusers in {report['reference_dtype']} |"
    yield ""
    yield "## Engines against torch"
    yield ""
    yield "Every engine with what torch's modules put out before it, through the server."
    yield ""
    yield "| engine | precision | runtime | cases | cosine, lowest | least | error, largest |"
    yield "|---|---|---|---:|---:|---:|---:|"
    for name, engine in report["engines"].items():
        cases = [case for case in report["cases"] if case["engine"] == name]
        yield (
            f"| {name} | {engine['precision']} | {engine['runtime']} | {len(cases)} "
            f"| {min(case['cosine'] for case in cases):.6f} | {cases[0]['least']} "
            f"| {max(case['relative_error'] for case in cases):.2e} |"
        )
    yield ""
    yield "## Pictures"
    yield ""
    quality = report["quality"]
    distance = quality["distances"]
    yield (
        f"{quality['count']} pictures of the gate `{quality['gate']}` against "
        f"{distance['reference']}: PSNR {distance['psnr']:.1f} dB, SSIM {distance['ssim']:.4f}, "
        f"FLIP {distance['flip']:.4f}; noise predictions: lowest cosine "
        f"{quality['noise_cosine']['lowest']:.6f}."
    )
    if "score" in quality:
        yield ""
        low, high = quality["score_low"], quality["score_high"]
        yield f"Score {quality['score']:.3f} ({low:.3f} … {high:.3f})."
    yield ""
    yield "## Speed"
    yield ""
    seconds, together = speed["seconds"], speed["together"]
    asked = ", ".join(f"{name} {value!r}" for name, value in speed["fields"].items())
    yield f"Requests of the gate ({asked}; JPEG), prompts and seeds never asked before."
    yield ""
    yield "| | |"
    yield "|---|---:|"
    yield f"| one at a time, median of {speed['requests']} | {seconds['median']:.3f} s |"
    yield f"| lowest and highest | {seconds['lowest']:.3f} s, {seconds['highest']:.3f} s |"
    for name, value in speed["stages_ms"].items():
        yield f"| {name}, median | {value:.1f} ms |"
    rate = together["pictures_a_second"]
    yield f"| {speed['in_flight']} in flight | {rate:.2f} pictures a second |"
    for uuid, used in speed["gpu_memory_used_bytes"].items():
        yield f"| memory of {uuid} in use, idle | {used / 2**30:.1f} GiB |"
