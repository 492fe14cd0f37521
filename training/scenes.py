"""Pictures and captions of the synthetic world, made by worker processes.

No torch in here: a worker starts fast and never touches the GPU.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from quality.world import LANGUAGES, Scene, describe, held_out, random_scene, render

# Captions of each scene and language, and the longest text behind the template's dropped tokens.
CAPTIONS = 4
MAX_TEXT = 160
CHUNK = 256

_tokenizer: Tokenizer | None = None


@dataclass(frozen=True)
class Scenes:
    """Scenes of one picture size.

    pictures  uint8 [N, H, W, 3]
    ids       int16 [N, 2·CAPTIONS, MAX_TEXT]: whole prompts in the template, without the tokens
              that all of them share at the start; English first
    lengths   int16 [N, 2·CAPTIONS]
    """

    pictures: np.ndarray
    ids: np.ndarray
    lengths: np.ndarray


def captions_to_learn_words_from(seed: int, count: int = 20_000) -> list[str]:
    rng = np.random.default_rng([seed, 1])
    return [describe(random_scene(rng), LANGUAGES[i % 2], rng) for i in range(count)]


def common_words(
    captions: list[str], split: Callable[[str], list[str]], at_least: int = 20
) -> list[str]:
    """Words that deserve a token of their own, the most frequent first.

    Whole ASCII words as `split` gives them; of other scripts single characters, because their
    words are not separated.
    """
    counts: Counter[str] = Counter()
    for caption in captions:
        for word in split(caption):
            counts.update([word] if word.isascii() else [c for c in word if not c.isascii()])
    return [
        word for word, n in sorted(counts.items(), key=lambda x: (-x[1], x[0])) if n >= at_least
    ]


def captions_of(scene: Scene, rng: np.random.Generator) -> list[str]:
    """CAPTIONS in each language, none of those that are kept for measuring."""
    captions = []
    for language in LANGUAGES:
        for _ in range(CAPTIONS):
            caption = describe(scene, language, rng)
            while held_out(caption):
                caption = describe(scene, language, rng)
            captions.append(caption)
    return captions


def start_worker(tokenizer: str) -> None:
    global _tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _tokenizer = Tokenizer.from_str(tokenizer)


def make_scenes(seed: tuple[int, ...], template: tuple[str, str], dropped: int) -> list[Scenes]:
    """CHUNK scenes, grouped by picture size."""
    assert _tokenizer is not None
    rng = np.random.default_rng(seed)
    pictures: dict[tuple[int, ...], list[np.ndarray]] = defaultdict(list)
    texts: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for _ in range(CHUNK):
        scene = random_scene(rng)
        picture = render(scene)
        pictures[picture.shape].append(picture)
        texts[picture.shape] += [
            template[0] + text + template[1] for text in captions_of(scene, rng)
        ]
    result = []
    for shape, group in pictures.items():
        encoded = [item.ids[dropped:] for item in _tokenizer.encode_batch(texts[shape])]
        ids = np.zeros((len(encoded), MAX_TEXT), np.int16)
        for row, tokens in zip(ids, encoded, strict=True):
            row[: len(tokens)] = tokens  # raises for a caption that is too long
        lengths = np.array([len(tokens) for tokens in encoded], np.int16)
        per_scene = 2 * CAPTIONS
        result.append(
            Scenes(
                np.stack(group),
                ids.reshape(-1, per_scene, MAX_TEXT),
                lengths.reshape(-1, per_scene),
            )
        )
    return result


class Renderer:
    """Workers that make scenes without end, a few chunks ahead. A context manager."""

    def __init__(
        self,
        tokenizer: str,
        template: tuple[str, str],
        dropped: int,
        seed: tuple[int, ...],
        workers: int | None = None,
    ) -> None:
        self.workers = workers or max(1, (os.cpu_count() or 1) - 2)
        self._executor = ProcessPoolExecutor(
            self.workers,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=start_worker,
            initargs=(tokenizer,),
        )
        self._arguments = (template, dropped)
        self._seed = seed
        self._next = 0
        self._waiting: list[Future[list[Scenes]]] = []
        for _ in range(2 * self.workers):
            self._submit()

    def _submit(self) -> None:
        seed = (*self._seed, self._next)
        self._waiting.append(self._executor.submit(make_scenes, seed, *self._arguments))
        self._next += 1

    def ready(self, wait: bool = False) -> Iterator[Scenes]:
        """The next chunk's scenes: with `wait` in any case, otherwise if they are there.

        In the order of the seeds, so that the same seed gives the same scenes.
        """
        if wait or self._waiting[0].done():
            future = self._waiting.pop(0)
            self._submit()
            yield from future.result()

    def __enter__(self) -> Renderer:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
