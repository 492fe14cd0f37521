"""Training data on the GPU: scenes that keep coming while the training runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from quality.world import PICTURE_SIZES
from training.scenes import Renderer, Scenes


@dataclass
class Bucket:
    """Scenes of one picture size, up to `capacity`; then new ones replace the oldest."""

    items: torch.Tensor  # [capacity, ...], what the pool keeps of each picture
    ids: torch.Tensor  # int16 [capacity, captions, MAX_TEXT]
    lengths: np.ndarray  # int16 [capacity, captions], on the CPU: batches need no GPU sync
    count: int = 0
    cursor: int = 0

    def add(self, items: torch.Tensor, scenes: Scenes) -> None:
        n = min(len(items), len(self.items))
        if self.cursor + n > len(self.items):
            self.cursor = 0
        place = slice(self.cursor, self.cursor + n)
        self.items[place] = items[:n]
        self.ids[place] = torch.from_numpy(scenes.ids[:n]).to(self.ids.device)
        self.lengths[place] = scenes.lengths[:n]
        self.cursor += n
        self.count = max(self.count, self.cursor)


@dataclass(frozen=True)
class Batch:
    """One picture size. items [B, ...]; ids int64 [B, L] and mask bool [B, L]."""

    items: torch.Tensor
    ids: torch.Tensor
    mask: torch.Tensor


def join(parts: list[Scenes]) -> Scenes:
    return Scenes(
        np.concatenate([x.pictures for x in parts]),
        np.concatenate([x.ids for x in parts]),
        np.concatenate([x.lengths for x in parts]),
    )


class Pool:
    """`keep` turns pictures (uint8 [N, H, W, 3] on the device) into what is kept of them."""

    def __init__(
        self,
        renderer: Renderer,
        capacity: int,
        device: torch.device,
        keep: Callable[[torch.Tensor], torch.Tensor] = lambda pictures: pictures,
        seed: tuple[int, ...] = (0,),
        lump: int = 1,
    ) -> None:
        self.lump = min(lump, capacity)  # pictures of a size that are taken in at once
        self.renderer = renderer
        self.capacity = capacity  # of each size
        self.device = device
        self.buckets: dict[tuple[int, int], Bucket] = {}
        self._keep = keep
        self._pending: dict[tuple[int, int], list[Scenes]] = {}
        self._rng = np.random.default_rng(seed)

    @property
    def count(self) -> int:
        return sum(bucket.count for bucket in self.buckets.values())

    def fill(self, count: int) -> None:
        while self.count < min(count, len(PICTURE_SIZES) * self.capacity):
            self.grow(wait=True)

    def grow(self, wait: bool = False) -> None:
        """Takes in a chunk that has been rendered meanwhile."""
        for scenes in self.renderer.ready(wait):
            height, width = scenes.pictures.shape[1:3]
            pending = self._pending.setdefault((height, width), [])
            pending.append(scenes)
            if sum(len(x.pictures) for x in pending) >= self.lump:
                self._take(join(pending))
                pending.clear()

    def convert(self, keep: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Keeps something else from now on, also of what is there."""
        self._keep = keep
        for bucket in self.buckets.values():
            old = bucket.items
            parts = [
                keep(old[i : min(i + 1024, bucket.count)]) for i in range(0, bucket.count, 1024)
            ]
            bucket.items = parts[0].new_empty(len(old), *parts[0].shape[1:])
            bucket.items[: bucket.count] = torch.cat(parts)
        self.lump = min(1024, self.capacity)

    def _take(self, scenes: Scenes) -> None:
        pictures = torch.from_numpy(scenes.pictures).to(self.device)
        height, width = pictures.shape[1:3]
        items = self._keep(pictures)
        if (height, width) not in self.buckets:
            self.buckets[height, width] = Bucket(
                items.new_empty(self.capacity, *items.shape[1:]),
                torch.empty(
                    self.capacity, *scenes.ids.shape[1:], dtype=torch.int16, device=self.device
                ),
                np.empty((self.capacity, scenes.lengths.shape[1]), np.int16),
            )
        self.buckets[height, width].add(items, scenes)

    def batch(self, size: int, round_text_to: int = 16) -> Batch:
        """`size` scenes of one picture size, each with one of its captions.

        Texts are as long as the longest one, rounded up, so that there are few shapes to compile.
        """
        buckets = list(self.buckets.values())
        shares = np.array([bucket.count for bucket in buckets])
        bucket = buckets[self._rng.choice(len(buckets), p=shares / shares.sum())]
        scene = self._rng.integers(bucket.count, size=size)
        caption = self._rng.integers(bucket.lengths.shape[1], size=size)
        lengths = bucket.lengths[scene, caption].astype(np.int64)
        longest = -(-int(lengths.max()) // round_text_to) * round_text_to
        at, which, valid = (self._to_device(x) for x in (scene, caption, lengths))
        return Batch(
            bucket.items[at],
            bucket.ids[at, which, :longest].long(),
            torch.arange(longest, device=self.device) < valid[:, None],
        )

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)
