"""Where the training stands: its state on disk, its log, its loss curves."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw

LOG_EVERY = 50


def learning_rate(step: int, start: int, steps: int, peak: float, warmup: int) -> float:
    """Warm-up (again after a resume, whose optimizer starts empty), constant, down to 1 % at last.

    The decay takes the last 30 % of the steps, so that `steps` can be changed before that.
    """
    rise = min(1.0, (step - start + 1) / max(warmup if start == 0 else warmup // 2, 1))
    left = (1 - step / max(steps, 1)) / 0.3
    return peak * rise * min(1.0, max(0.01, left))


class Progress:
    """Steps, seconds and logged values of each stage; `deadline` in seconds from now."""

    def __init__(self, folder: Path, minutes: float) -> None:
        self.folder = folder
        self.state: dict[str, Any] = {"stages": {}, "runs": 0}
        self._file = folder / "state.json"
        if self._file.exists():
            self.state = json.loads(self._file.read_text(encoding="utf-8"))
        self.state["runs"] += 1
        self._deadline = time.monotonic() + 60 * minutes
        self._sums: dict[str, torch.Tensor] = {}
        self._since: tuple[float, int] | None = None

    def stage(self, name: str) -> dict[str, Any]:
        return self.state["stages"].setdefault(name, {"steps": 0, "seconds": 0.0, "log": []})

    def steps(self, name: str) -> int:
        return self.stage(name)["steps"]

    def remaining(
        self, name: str, steps: int, optimizer: torch.optim.Optimizer, peak: float, warmup: int
    ) -> Iterator[int]:
        """The steps of a stage that are left, as long as the time lasts; sets the learning rate."""
        start = self.steps(name)
        for step in range(start, steps):
            if time.monotonic() > self._deadline:
                return
            for group in optimizer.param_groups:
                group["lr"].fill_(learning_rate(step, start, steps, peak, warmup))
            yield step

    def add(self, name: str, step: int, steps: int, **values: torch.Tensor) -> None:
        """Counts a step. Values stay on the GPU until they are shown."""
        stage = self.stage(name)
        if self._since is None or self._since[1] < stage["steps"] - LOG_EVERY:
            self._since = (time.monotonic(), step - 1)
        stage["steps"] = step
        for key, value in values.items():
            value = value.detach().float()
            self._sums[key] = self._sums[key] + value if key in self._sums else value
        if step % LOG_EVERY and step != steps:
            return
        began, first = self._since
        means = {key: float(value) / (step - first) for key, value in self._sums.items()}
        seconds = time.monotonic() - began
        self._sums, self._since = {}, (time.monotonic(), step)
        stage["seconds"] += seconds
        stage["log"].append([step, round(means["loss"], 6)])
        pace = (step - first) / max(seconds, 1e-9)
        shown = "  ".join(f"{key} {value:.4f}" for key, value in means.items())
        left = max(0.0, self._deadline - time.monotonic()) / 60
        print(
            f"{name} {step}/{steps}  {shown}  {pace:.1f} steps/s, "
            f"{(steps - step) / pace / 60:.1f} min to go, {left:.1f} min left in this run",
            flush=True,
        )
        if not all(map(math.isfinite, means.values())):
            raise SystemExit(f"{name}: the loss is not finite at step {step}; nothing was saved")

    def stage_done(self) -> None:
        self._sums, self._since = {}, None

    def save(self) -> None:
        self._file.write_text(json.dumps(self.state, ensure_ascii=False), encoding="utf-8")
        draw_curves(
            {name: stage["log"] for name, stage in self.state["stages"].items() if stage["log"]},
            self.folder / "curves.png",
        )


def draw_curves(curves: dict[str, list[list[float]]], path: Path) -> None:
    """One panel for each curve of (step, loss), the loss on a logarithmic scale."""
    width, height, edge = 480, 320, 44
    image = Image.new("RGB", (width * max(len(curves), 1), height), "white")
    draw = ImageDraw.Draw(image)
    for panel, (name, log) in enumerate(curves.items()):
        left = panel * width
        values = [math.log10(max(value, 1e-9)) for _, value in log]
        low, high = min(values), max(values)
        span, last = max(high - low, 1e-6), max(log[-1][0], 1)
        points = [
            (
                left + edge + step / last * (width - 2 * edge),
                edge + (high - value) / span * (height - 2 * edge),
            )
            for (step, _), value in zip(log, values, strict=True)
        ]
        draw.rectangle((left + edge, edge, left + width - edge, height - edge), outline="grey")
        draw.line(points, fill=(30, 75, 215), width=2)
        draw.text((left + edge, 8), f"{name}: loss, {last} steps", fill="black")
        draw.text((left + 4, edge), f"{10**high:.3g}", fill="black")
        draw.text((left + 4, height - edge - 10), f"{10**low:.3g}", fill="black")
    image.save(path)
