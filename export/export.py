"""Checkpoint → a folder for each engine: traced, checked, converted by its recipe."""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import torch

from export.calibration import Calibration, load_calibration
from export.checkpoint import Checkpoint
from export.convert import convert_engine
from export.engines import Engine, engines
from export.files import write_whole
from export.graph import ExportError
from export.packed import write_packed
from export.progress import Progress, ignore_progress
from export.recipe import EngineRecipe
from export.source import Planned, Written
from export.verify import verify_engine
from export.write import DATA, MODEL, plan_engine, write_engine

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def export_checkpoint(
    checkpoint: Checkpoint,
    output: Path,
    verify: str = "auto",
    progress: Progress = ignore_progress,
    workers: int = 1,
    recipe: Mapping[str, EngineRecipe] | None = None,
    calibration: Path | None = None,
    kept: Mapping[str, dict[str, Any]] | None = None,
    finished: Callable[[str, dict[str, Any]], None] = lambda name, entry: None,
    packed: Collection[str] = (),
) -> dict[str, dict[str, Any]]:
    """Writes OUTPUT/<engine>/model.onnx and .data, of engines in `packed` model.safetensors;
    OUTPUT/tokenizer.json, OUTPUT/checkpoint.json.

    `verify`: `auto` checks engines above 2 GiB block by block, `full` every engine as a whole.
    Engines that `recipe` names are converted after their check in FP32, with the ranges in
    `calibration` (a file of `export.calibrate`). An engine's folder appears only when it is done;
    then `finished` is called with its name and manifest entry. Engines in `kept`, which has the
    entries of those that are there already, are passed over. With more than one of `workers`, so
    many engines at a time are exported, by forked processes. Returns for each engine its manifest
    entry. Raises CheckpointError, ExportError, OSError; ValueError for another `verify`.
    """
    if verify not in ("auto", "full"):
        raise ValueError(f"verify is {verify!r}, but it must be auto or full")
    output = Path(output)
    output.mkdir(parents=True, exist_ok=True)
    checkpoint.save_tokenizer(output / "tokenizer.json")
    made = engines(checkpoint)
    recipes = recipe or {}
    ranges = None
    if calibration is not None:
        ranges = load_calibration(calibration, checkpoint.describe()["fingerprint"])
    result = dict(kept or {})
    pending = [engine for engine in made if engine.name not in result]
    if workers == 1:
        for engine in pending:
            result[engine.name] = export_engine(
                engine,
                checkpoint,
                output,
                verify,
                progress,
                recipes.get(engine.name),
                ranges,
                engine.name in packed,
            )
            finished(engine.name, result[engine.name])
    elif pending:
        fork = multiprocessing.get_context("fork")  # what is imported and read need not be again
        parent = os.getpid()
        with workers_of(
            ProcessPoolExecutor(min(workers, len(pending)), fork, start_worker, (parent,))
        ) as pool:
            tasks = {
                pool.submit(
                    export_engine,
                    engine,
                    checkpoint,
                    output,
                    verify,
                    ignore_progress,
                    recipes.get(engine.name),
                    ranges,
                    engine.name in packed,
                ): engine.name
                for engine in pending
            }
            for i, task in enumerate(as_completed(tasks)):
                progress("engines", i, len(pending))
                name = tasks[task]
                try:
                    result[name] = task.result()
                except BrokenProcessPool:
                    raise ExportError(f"the process that exported {name} was killed") from None
                finished(name, result[name])
        progress("engines", len(pending), len(pending))
    text = json.dumps(checkpoint.describe(), indent=2, ensure_ascii=False)
    write_whole(output / "checkpoint.json", (text + "\n").encode())
    return {engine.name: result[engine.name] for engine in made}


@contextlib.contextmanager
def workers_of(pool: ProcessPoolExecutor) -> Iterator[ProcessPoolExecutor]:
    """The pool; whatever ends the body early ends its processes, too."""
    try:
        yield pool
    except BaseException:
        for process in list((pool._processes or {}).values()):
            process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def start_worker(parent: int) -> None:
    """Interruptions are the parent's to handle, and with it the worker ends. One thread: a forked
    process waits for ever for the OpenMP threads that its parent had."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before that
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)


def export_engine(
    engine: Engine,
    checkpoint: Checkpoint,
    output: Path,
    verify: str,
    progress: Progress = ignore_progress,
    recipe: EngineRecipe | None = None,
    calibration: Calibration | None = None,
    packed: bool = False,
) -> dict[str, Any]:
    """Checks, converts and writes OUTPUT/<engine>; returns its manifest entry.

    What a recipe converts is never written in FP32, where it would be two to eight times as large.
    """
    folder = output / f"{engine.name}.partial"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    converted: dict[str, Any] = {}
    try:
        if recipe is None:
            write_engine(engine, checkpoint, folder, progress)
            written = Written(engine.name, folder)
            verified = verify_engine(engine, checkpoint, written, verify, progress)
        else:
            model, weights = plan_engine(engine, checkpoint, progress)
            planned = Planned(engine.name, model, weights)
            verified = verify_engine(engine, checkpoint, planned, verify, progress)
            del planned  # with the weights that it has given last
            if packed:
                borders = entry(engine, verified)
                converted = write_packed(
                    engine, checkpoint, recipe, borders, calibration, folder, progress
                )
            else:
                converted = convert_engine(
                    engine, model, weights, recipe, calibration, folder, progress
                )
        shutil.rmtree(output / engine.name, ignore_errors=True)
        folder.rename(output / engine.name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return entry(engine, verified) | converted


def entry(engine: Engine, verified: dict[str, Any]) -> dict[str, Any]:
    """What the manifest says of an engine; free dimensions are −1."""

    def borders(tensors: Any) -> dict[str, Any]:
        return {
            tensor.name: {
                "dtype": "FP32" if tensor.dtype.name == "FLOAT" else tensor.dtype.name,
                "shape": [-1 if isinstance(dim, str) else dim for dim in tensor.shape],
            }
            for tensor in tensors
        }

    return {
        "precision": "fp32",
        "artifact": MODEL,
        "files": [MODEL, DATA],
        "inputs": borders(engine.inputs),
        "outputs": borders(engine.outputs),
        "verified": verified,
    }
