"""ONNX → engine: `model.plan` by TensorRT (10.13–11), `model.rtx` by TensorRT-RTX.

TensorRT times its kernels on the GPU that will run the engine, so it builds there. TensorRT-RTX
compiles for a named architecture on any machine and picks kernels when the engine is loaded. Both
have the same Python API; they differ in the target and in the timing cache.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from build.profile import BuildError
from export.files import write_whole
from export.progress import Progress, ignore_progress

logger = logging.getLogger(__name__)
logger.addHandler(logging.NullHandler())  # silent until somebody configures logging

RTX = "tensorrt_rtx"
# Module → (what people call it, where to get it). An engine runs only in the version of the
# library that built it, and containers of one release hold the same.
LIBRARIES = {
    "tensorrt": (
        "TensorRT",
        "run this in NVIDIA's container nvidia/tensorrt:<yy.mm>-py3 of the server's release, "
        "or `pip install tensorrt==<the server's version>`",
    ),
    RTX: ("TensorRT-RTX", "`pip install tensorrt-rtx`"),
}

_LEVELS = {
    "INTERNAL_ERROR": logging.CRITICAL,
    "ERROR": logging.ERROR,
    "WARNING": logging.WARNING,
    "INFO": logging.INFO,
    "VERBOSE": logging.DEBUG,
}
_DTYPES = {"FLOAT": "FP32", "HALF": "FP16"}  # TensorRT's names → Triton's; the others are equal
_SHOWN_ERRORS = 3  # of the parser, which has one for every node that it does not know


@dataclass(frozen=True)
class ShapeRange:
    """The shapes of one input: the smallest, the one to optimize for, the largest."""

    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]


# A range for every input that has free dimensions.
OptimizationProfile = Mapping[str, ShapeRange]


class Gpu(NamedTuple):
    """A GPU: its name, and its architecture as `sm120`."""

    name: str
    sm: str


class Machine(NamedTuple):
    """What builds engines here. builder: the library. device: the GPU's name, None for
    TensorRT-RTX, which needs none."""

    builder: str
    version: str
    target: str
    device: str | None


def build_engine(
    model: Path,
    output: Path,
    library: str,
    target: str | None,
    profiles: Sequence[OptimizationProfile],
    timing_cache: Path | None = None,
    progress: Progress = ignore_progress,
    verbose: bool = False,
    *,
    weight_streaming: bool = False,
    made_from: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Builds a strongly typed engine, and its description beside it (`model.rtx`, `model.json`).

    An interruption leaves no half-written file; it takes effect at the builder's next step.

    Args:
        model: `<engine>/model.onnx`, its external data beside it.
        output: the engine's file; is replaced.
        library: `tensorrt` or `tensorrt_rtx`.
        target: the architecture to build for, such as `sm120`. TensorRT-RTX needs no GPU for it;
            TensorRT builds only for the GPU in the machine, which must then be such a one.
            None: that of the GPU in the machine.
        profiles: optimization profiles, the narrowest first; none if every dimension is fixed.
        timing_cache: a file that is read and written by TensorRT. TensorRT-RTX times nothing.
        progress: called from another thread.
        verbose: logs TensorRT's most detailed messages, too.
        weight_streaming: lets the engine keep some of its weights in the host's memory.
        made_from: what the engine was made from, such as its precision and the fingerprints of
            checkpoint and recipe; part of its description and of its name.

    Returns:
        The description: `name`, `library`, `version`, `target`, `device` (name of the GPU on
        which TensorRT timed the engine; None for TensorRT-RTX), `made_from`, `weight_streaming`,
        `inputs` and `outputs` (dtype and shape, free dimensions −1), `profiles` (every input's
        min, opt and max), `bytes`, `seconds`.

    Raises:
        BuildError: the library is missing, there is no GPU, target or profiles do not fit, or the
            library refuses the graph.
    """
    trt, title = _import_library(library)
    gpu = find_gpu()
    target = _choose_target(trt, library, target, gpu)
    device = gpu.name if gpu and library != RTX else None
    made_from = dict(made_from or {})
    name = " ".join([*made_from.values(), library, trt.__version__, device or target])
    what = f"{model.parent.name}: build for {target}"
    log, monitor = _log(trt), _monitor(trt, what, progress)
    log.errors, log.verbose = [], verbose
    started = time.monotonic()

    def build() -> tuple[Any, dict[str, Any]]:
        """Returns the engine, and what the description says of its tensors."""
        try:
            builder = trt.Builder(log)
        except TypeError:  # pybind11's word for "there is none"
            raise BuildError(f"{title} cannot start: {_reason(log.errors)}") from None
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        parser = trt.OnnxParser(network, log)  # owns the weights: must live as long as the network
        if not parser.parse_from_file(str(model)) or not network.num_outputs:
            raise BuildError(f"{title} cannot read {model}: {_parser_errors(parser, log.errors)}")
        network.name = name
        inputs = _borders(network.get_input, network.num_inputs)
        shapes = {tensor: tuple(border["shape"]) for tensor, border in inputs.items()}
        complete = complete_profiles(shapes, profiles)
        config = builder.create_builder_config()
        config.progress_monitor = monitor
        if weight_streaming:
            config.set_flag(trt.BuilderFlag.WEIGHT_STREAMING)
        for profile in complete:
            optimization = builder.create_optimization_profile()
            for tensor, bounds in profile.items():
                optimization.set_shape(tensor, bounds.min, bounds.opt, bounds.max)
            config.add_optimization_profile(optimization)
        if library == RTX:
            config.num_compute_capabilities = 1
            config.set_compute_capability(getattr(trt.ComputeCapability, target.upper()), 0)
        elif timing_cache:
            _load_timing_cache(config, timing_cache)
        plan = builder.build_serialized_network(network, config)
        if plan is None:
            raise BuildError(f"{title} cannot build {model} for {target}: {_reason(log.errors)}")
        if timing_cache and library != RTX:
            write_whole(timing_cache, config.get_timing_cache().serialize())
        return plan, {
            "inputs": inputs,
            "outputs": _borders(network.get_output, network.num_outputs),
            "profiles": [
                {
                    tensor: {bound: list(shape) for bound, shape in asdict(bounds).items()}
                    for tensor, bounds in profile.items()
                }
                for profile in complete
            ],
        }

    # In a thread of its own: TensorRT swallows what is raised in its callbacks, so an interruption
    # must reach another thread than the one that builds.
    with ThreadPoolExecutor(1) as pool:
        try:
            plan, tensors = pool.submit(build).result()
        except BaseException:
            monitor.cancelled = True
            raise
    description = {
        "name": name,
        "library": library,
        "version": trt.__version__,
        "target": target,
        "device": device,
        "made_from": made_from,
        "weight_streaming": weight_streaming,
        **tensors,
        "bytes": plan.nbytes,
        "seconds": round(time.monotonic() - started, 1),
    }
    write_whole(output, plan)
    write_whole(output.with_suffix(".json"), (json.dumps(description, indent=1) + "\n").encode())
    progress(what, 100, 100)
    return description


def find_gpu() -> Gpu | None:
    """Returns the machine's first GPU, None if torch can use none."""
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return Gpu(torch.cuda.get_device_name(), f"sm{major}{minor}")


def find_machine(
    library: str,
    targets: Sequence[str],
    wanted: str | None,
    profiles: Mapping[str, Sequence[str]],
) -> Machine:
    """Returns what builds engines for one of `targets`: `wanted`, if it is named, else the GPU's
    architecture, else the only one there is.

    profiles: the names of those for a library and target, such as `tensorrt sm90`.

    Raises:
        BuildError: the library is missing, or none of the targets can be built for here.
    """
    trt, title = _import_library(library)
    gpu = find_gpu()
    here = wanted if library == RTX else None
    if here is None and gpu is not None and gpu.sm in targets:
        here = gpu.sm
    if here is None and library == RTX and len(targets) == 1:
        here = targets[0]
    if here is None and library == RTX:
        raise BuildError(
            f"{title} compiles for {' or '.join(targets)}, and "
            f"{f'the GPU here, {gpu.name}, is {gpu.sm}' if gpu else 'torch finds no GPU here'}: "
            f"name one, as in TARGET={targets[0]}"
        )
    if gpu is not None and (here is None or wanted not in (None, here)):
        others = profiles.get(f"{library} {gpu.sm}")
        hint = f", or take PROFILE={' or '.join(others)}" if others else ""
        raise BuildError(
            f"{title} builds for the GPU in the machine, which is {gpu.name} ({gpu.sm}), and the "
            f"engines are wanted for {wanted or ' or '.join(targets)}: run this where such a GPU "
            f"is{hint}"
        )
    target = _choose_target(trt, library, here, gpu)
    device = gpu.name if gpu and library != RTX else None
    return Machine(library, trt.__version__, target, device)


def complete_profiles(
    inputs: Mapping[str, tuple[int, ...]], profiles: Sequence[OptimizationProfile]
) -> list[dict[str, ShapeRange]]:
    """Returns the profiles with a range for every input, also for those of fixed shape.

    Args:
        inputs: shapes by name, free dimensions −1.

    Raises:
        BuildError: names the tensor that is unknown, lacks a range or has an impossible one.
    """
    complete = []
    for number, profile in enumerate(profiles or [{}]):
        unknown = sorted(profile.keys() - inputs.keys())
        if unknown:
            raise BuildError(
                f"profile {number} has a range for {', '.join(unknown)}, which is no input of the "
                f"graph; its inputs are {', '.join(inputs)}"
            )
        ranges = {}
        for name, shape in inputs.items():
            if name not in profile and -1 in shape:
                raise BuildError(
                    f"the input {name} has free dimensions, {list(shape)}, but profile {number} "
                    "has no range for it"
                )
            bounds = profile.get(name, ShapeRange(shape, shape, shape))
            problem = _problem(shape, bounds)
            if problem:
                raise BuildError(
                    f"profile {number} has {name} from {list(bounds.min)} over {list(bounds.opt)} "
                    f"to {list(bounds.max)}, but {problem}"
                )
            ranges[name] = bounds
        complete.append(ranges)
    return complete


def _problem(shape: tuple[int, ...], bounds: ShapeRange) -> str | None:
    """Says what is wrong with the range of an input of this shape."""
    if {len(bounds.min), len(bounds.opt), len(bounds.max)} != {len(shape)}:
        return f"the graph has {list(shape)}"
    for size, low, best, high in zip(shape, bounds.min, bounds.opt, bounds.max, strict=True):
        if not 1 <= low <= best <= high:
            return "each size must be at least 1 and must not fall"
        if size not in (-1, low) or size not in (-1, high):
            return f"the graph has {list(shape)}"
    return None


def _import_library(library: str) -> tuple[Any, str]:
    """Returns the module and the name that people know it by."""
    title, source = LIBRARIES[library]
    try:
        return importlib.import_module(library), title
    except (ImportError, OSError) as error:  # OSError: its shared libraries
        raise BuildError(f"{title} is not installed ({error}): {source}") from None


def _choose_target(trt: Any, library: str, target: str | None, gpu: Gpu | None) -> str:
    title, _ = LIBRARIES[library]
    if library != RTX:
        if gpu is None:
            raise BuildError(
                f"{title} builds on the GPU that will run the engine, and torch finds none here: "
                "run this on that machine, in a container with `--gpus all`"
            )
        if target not in (None, gpu.sm):
            raise BuildError(
                f"the engine is wanted for {target}, but {title} builds for the GPU in the "
                f"machine, {gpu.name}, which is {gpu.sm}"
            )
        return gpu.sm
    known = [name.lower() for name in trt.ComputeCapability.__members__ if name.startswith("SM")]
    wanted = target or (gpu.sm if gpu else "")
    if wanted not in known:
        problem = (
            f"does not build for {wanted!r}" if wanted else "needs a target, as torch finds no GPU"
        )
        raise BuildError(f"{title} {problem}; its targets are {', '.join(known)}")
    return wanted


def _load_timing_cache(config: Any, path: Path) -> None:
    data = path.read_bytes() if path.is_file() else b""
    cache = config.create_timing_cache(data)
    if cache is None or not config.set_timing_cache(cache, False):
        # It is another version's or another GPU's.
        config.set_timing_cache(config.create_timing_cache(b""), False)


@functools.cache
def _log(trt: Any) -> Any:
    """Returns the library's ILogger: there is one, as it ignores a second while the first lives."""

    class Log(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []
            self.verbose = False

        def log(self, severity: Any, msg: str) -> None:
            level = _LEVELS[severity.name]
            if level >= logging.ERROR:
                self.errors.append(" ".join(msg.split()))
            if self.verbose or level > logging.DEBUG:
                logger.log(level, "%s", msg)

    return Log()


def _monitor(trt: Any, what: str, progress: Progress) -> Any:
    """Returns an IProgressMonitor with `cancelled`."""

    class Monitor(trt.IProgressMonitor):
        """Phases nest: a step of one holds whole phases. Called from several threads."""

        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.cancelled = False
            self._lock = threading.Lock()
            self._phases: dict[str, tuple[str | None, int]] = {}  # name → parent, steps
            self._done: dict[str, int] = {}
            self._percent = 0

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            with self._lock:
                self._phases[phase_name] = (parent_phase, num_steps)
                self._done[phase_name] = 0

        def step_complete(self, phase_name: str, step: int) -> bool:
            with self._lock:
                self._done[phase_name] = step + 1
                fraction, name = 0.0, phase_name
                while name in self._phases:
                    parent, steps = self._phases[name]
                    fraction = min(1.0, (self._done[name] + fraction) / steps)
                    name = parent or ""
                self._percent = max(self._percent, int(100 * fraction))
                progress(what, self._percent, 100)
            return not self.cancelled

        def phase_finish(self, phase_name: str) -> None:
            with self._lock:
                self._phases.pop(phase_name, None)

    return Monitor()


def _borders(get: Any, count: int) -> dict[str, Any]:
    """Returns dtype and shape of inputs or outputs, as the manifest has them."""
    tensors = [get(i) for i in range(count)]
    return {
        tensor.name: {
            "dtype": _DTYPES.get(tensor.dtype.name, tensor.dtype.name),
            "shape": list(tensor.shape),
        }
        for tensor in tensors
    }


def _parser_errors(parser: Any, log: list[str]) -> str:
    errors = [parser.get_error(i) for i in range(parser.num_errors)]
    if not errors:
        return "it holds no ONNX graph"
    if errors[0].node() < 0:
        # The parser's own error does not name a file that is missing.
        return (log or [errors[0].desc()])[0]
    told = [
        f"{error.node_name()} ({error.node_operator()}) {error.code().name}: {error.desc()}"
        for error in errors[:_SHOWN_ERRORS]
    ]
    more = len(errors) - len(told)
    return " ".join("; ".join([*told, *([f"and {more} more"] if more else [])]).split())


def _reason(errors: list[str]) -> str:
    """Returns the last error of the log."""
    # Without a driver, every error is followed by one that says so.
    telling = [error for error in errors if "catchCudaError" not in error]
    return (telling or errors or ["it gives no reason"])[-1]
