"""Checks an FP32 engine in ONNX Runtime against the stock torch modules, and any written engine
against what was to be written.

Engines up to `WHOLE_LIMIT` run as a whole. Larger ones run stage by stage: each stage is cut out of
the graph, takes its own weights from where the engine is, gets the reference's inputs and is
compared with the reference's outputs.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
from onnx.external_data_helper import ExternalDataInfo

from export.checkpoint import Checkpoint
from export.engines import Engine
from export.graph import ExportError, Tensor
from export.progress import Progress
from export.quiet import quiet
from export.reference import REFERENCES
from export.source import Planned, Written, external, read_graph
from export.stored import first_line
from export.write import DATA

WHOLE_LIMIT = 2 * 2**30  # bytes of weights
PIECE_LIMIT = 256 * 2**20  # bytes of weights in one session of a stage, if a tensor is not larger
READ = 4 * 2**20  # bytes of a written file that are in memory at a time
# Allowed differences as a part of the largest value that is added to a stage's input, or that an
# engine puts out. FP32 in another order differs by about 1e-6 of it in one stage, and by more after
# tens of them in a trained model; a wrong operator, mask or weight by 1e-3 and more.
STAGE_TOLERANCE = 2e-5
WHOLE_TOLERANCE = 1e-4
# As a part of the largest value: two FP32 roundings of a sum with a much larger residual.
ROUNDING = 2 * 2.0**-23
MISROUNDED = 1e-2  # the part of a picture's bytes that may be off by 1


def verify_engine(
    engine: Engine, checkpoint: Checkpoint, source: Written | Planned, mode: str, progress: Progress
) -> dict[str, Any]:
    """Checks borders and values; `mode` is `auto` or `full`. Returns what was checked.

    Raises ExportError, which names the engine and the tensor.
    """
    check_borders(engine.name, source.graph.graph.input, engine.inputs)
    check_borders(engine.name, source.graph.graph.output, engine.outputs)
    by_stage = mode == "auto" and source.bytes > WHOLE_LIMIT and engine.blocks > 0
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for inputs this small more threads only wait for each other
    try:
        with torch.no_grad(), quiet():
            reference = REFERENCES[engine.name](checkpoint)
            if by_stage:
                error = verify_stages(engine, reference, source, progress)
            else:
                error = verify_whole(engine, reference, source, progress)
    finally:
        torch.set_num_threads(threads)
    shapes = [{name: list(value.shape) for name, value in case.items()} for case in reference.cases]
    return {"mode": "blocks" if by_stage else "whole", "shapes": shapes, "max_abs_error": error}


def check_written(name: str, folder: Path, sums: Mapping[str, int], progress: Progress) -> None:
    """Whether an engine's files hold what was to be written: a graph that ONNX accepts, and where
    it says that a weight lies, the bytes with that CRC-32. Raises ExportError."""
    found = {tensor.name: tensor for tensor in external(read_graph(name, folder))}
    if found.keys() != sums.keys():
        odd = sorted(found.keys() ^ sums.keys())
        raise ExportError(f"{name}: {odd[0]} is in the graph or in the data, but not in both")
    with (folder / DATA).open("rb") as stream:
        for i, (key, tensor) in enumerate(found.items()):
            progress(f"{name}: check", i, len(found))
            info, value = ExternalDataInfo(tensor), 0
            stream.seek(info.offset)
            for start in range(0, info.length, READ):
                value = zlib.crc32(stream.read(min(READ, info.length - start)), value)
            if value != sums[key]:
                raise ExportError(f"{name}: {folder / DATA} does not hold {key} as it was written")
    progress(f"{name}: check", len(found), len(found))


def verify_whole(
    engine: Engine, reference: Any, source: Written | Planned, progress: Progress
) -> float:
    what = f"{engine.name}: verify"
    progress(what, 0, len(reference.cases) + 1)
    expected = reference.whole()
    session = open_session(source.graph, engine.name, source)
    worst = 0.0
    for i, case in enumerate(reference.cases):
        progress(what, i + 1, len(reference.cases) + 1)
        feed = {key: value.contiguous().numpy() for key, value in case.items()}
        outputs = [tensor.name for tensor in engine.outputs]
        results = run(session, engine.name, outputs, feed)
        for name, result in zip(outputs, results, strict=True):
            value = expected[i][name].numpy()
            error = compare(f"{engine.name}: {name}", result, value, WHOLE_TOLERANCE)
            worst = max(worst, error)
    progress(what, len(reference.cases) + 1, len(reference.cases) + 1)
    return worst


def verify_stages(
    engine: Engine, reference: Any, source: Written | Planned, progress: Progress
) -> float:
    graph = source.graph
    what, count = f"{engine.name}: verify", len(engine.stages)
    worst = 0.0
    current = {tensor.name: tensor.name for tensor in engine.inputs}  # newest value of each name
    parts = dict(engine.stages)
    for i, stage in enumerate(reference.stages()):
        progress(what, i, count)
        part, name = parts[stage.name], f"{engine.name}, {stage.name}"
        borders = {t.name: current[t.name] for t in part.inputs if t.name in current}
        produced = {output: engine.value_name(stage.name, output) for output in part.outputs}
        nodes = cut(graph, name, set(borders.values()), list(produced.values()))
        feeds = [
            {borders[own]: value.numpy() for own, value in inputs.items() if own in borders}
            for inputs in stage.inputs
        ]
        results = run_in_pieces(source, name, nodes, feeds, set(produced.values()))
        for inputs, outputs, result in zip(stage.inputs, stage.outputs, results, strict=True):
            assert outputs.keys() == produced.keys()
            for own, expected in outputs.items():
                base = inputs[own].numpy() if own in inputs else None
                value = result[produced[own]]
                error = compare(f"{name}: {own}", value, expected.numpy(), STAGE_TOLERANCE, base)
                worst = max(worst, error)
        current |= produced
    check_collected(engine, graph)
    progress(what, count, count)
    return worst


def cut(
    graph: onnx.ModelProto, name: str, inputs: set[str], outputs: list[str]
) -> list[onnx.NodeProto]:
    """The nodes between two sets of a graph's values, in order.

    Raises ExportError if `outputs` depend on anything but `inputs` and initializers.
    """
    producer = {value: i for i, node in enumerate(graph.graph.node) for value in node.output}
    known = inputs | {tensor.name for tensor in graph.graph.initializer} | {""}
    found: set[int] = set()
    pending = list(outputs)
    while pending:
        value = pending.pop()
        if value in known:
            continue
        if value not in producer:
            raise ExportError(f"{name}: depends on {value}, which is none of its inputs")
        known.add(value)
        found.add(producer[value])
        pending += graph.graph.node[producer[value]].input
    return [graph.graph.node[i] for i in sorted(found)]


def run_in_pieces(
    source: Written | Planned,
    name: str,
    nodes: list[onnx.NodeProto],
    feeds: list[dict[str, np.ndarray]],
    outputs: set[str],
) -> list[dict[str, np.ndarray]]:
    """Runs `nodes` for each of `feeds`, in sessions with few weights each."""
    graph, values = source.graph, [dict(feed) for feed in feeds]
    pieces = split(graph, nodes)
    for i, piece in enumerate(pieces):
        needed = {value for later in pieces[i + 1 :] for node in later for value in node.input}
        made = [value for node in piece for value in node.output]
        wanted = [value for value in made if value in needed or value in outputs]
        model = piece_model(graph, piece, values[0], wanted)
        session = open_session(model, name, source, small=True)
        for case in values:
            feed = {value.name: case[value.name] for value in model.graph.input}
            case |= zip(wanted, run(session, name, wanted, feed), strict=True)
        del session
    return values


def split(graph: onnx.ModelProto, nodes: list[onnx.NodeProto]) -> list[list[onnx.NodeProto]]:
    """The nodes in groups whose weights measure at most `PIECE_LIMIT` where possible."""
    bytes_of = {tensor.name: 4 * math.prod(tensor.dims) for tensor in graph.graph.initializer}
    pieces: list[list[onnx.NodeProto]] = [[]]
    size = 0
    for node in nodes:
        more = sum(bytes_of.get(value, 0) for value in node.input)
        if size + more > PIECE_LIMIT and pieces[-1]:
            pieces.append([])
            size = 0
        pieces[-1].append(node)
        size += more
    return pieces


def piece_model(
    graph: onnx.ModelProto,
    nodes: list[onnx.NodeProto],
    values: dict[str, np.ndarray],
    outputs: list[str],
) -> onnx.ModelProto:
    """A model of some nodes of a graph; what they do not make they take from its weights or, with
    the type and rank found in `values`, as inputs."""
    weights = {tensor.name: tensor for tensor in graph.graph.initializer}
    made = {value for node in nodes for value in node.output} | {""}
    used = [v for v in dict.fromkeys(v for node in nodes for v in node.input) if v not in made]
    inputs = [
        onnx.helper.make_tensor_value_info(
            value,
            onnx.helper.np_dtype_to_tensor_dtype(values[value].dtype),
            [None] * values[value].ndim,
        )
        for value in used
        if value not in weights
    ]
    return onnx.helper.make_model(
        onnx.helper.make_graph(
            nodes,
            graph.graph.name,
            inputs,
            [onnx.helper.make_empty_tensor_value_info(value) for value in outputs],
            [weights[value] for value in used if value in weights],
        ),
        opset_imports=graph.opset_import,
        ir_version=graph.ir_version,
    )


def check_collected(engine: Engine, graph: onnx.ModelProto) -> None:
    """The output that joins one of every block must have all of them, in order."""
    wanted = [f"block.{i}.{engine.collected}" for i in range(engine.blocks)]
    for node in graph.graph.node:
        if engine.collected in node.output and list(node.input) != wanted:
            raise ExportError(
                f"{engine.name}: {engine.collected} does not join all blocks in order"
            )


def check_borders(engine: str, found: Any, declared: tuple[Tensor, ...]) -> None:
    """Names, element types and free dimensions of a graph's inputs or outputs."""
    if [value.name for value in found] != [tensor.name for tensor in declared]:
        raise ExportError(
            f"{engine}: the graph has {[value.name for value in found]} where "
            f"{[tensor.name for tensor in declared]} belong"
        )
    for value, tensor in zip(found, declared, strict=True):
        kind = value.type.tensor_type
        if kind.elem_type != tensor.dtype.value:
            dtype = onnx.TensorProto.DataType.Name(kind.elem_type)
            raise ExportError(
                f"{engine}: {tensor.name} is {dtype}, but it must be {tensor.dtype.name}"
            )
        shape = [dim.dim_param or dim.dim_value for dim in kind.shape.dim]
        if shape != list(tensor.shape):
            raise ExportError(
                f"{engine}: {tensor.name} has the dimensions {shape}, but they must be "
                f"{list(tensor.shape)}"
            )


def open_session(
    model: onnx.ModelProto, name: str, source: Written | Planned, small: bool = False
) -> Any:
    """A session of a graph or of a piece of it; `small`: without transposed or packed copies of
    weights and without a pool of memory."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if small:
        options.add_session_config_entry("session.disable_prepacking", "1")
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.enable_cpu_mem_arena = False
        options.enable_mem_pattern = False
    source.give(options, [tensor.name for tensor in external(model)])
    try:
        return ort.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:
        raise ExportError(
            f"{name}: ONNX Runtime does not load the graph: {first_line(error)}"
        ) from error


def run(session: Any, name: str, outputs: list[str], feed: dict[str, np.ndarray]) -> Any:
    try:
        return session.run(outputs, feed)
    except Exception as error:
        shapes = ", ".join(f"{key} {list(value.shape)}" for key, value in feed.items())
        raise ExportError(
            f"{name}: the graph does not take {shapes}: {first_line(error)}"
        ) from error


def compare(
    what: str,
    result: np.ndarray,
    expected: np.ndarray,
    tolerance: float,
    base: np.ndarray | None = None,
) -> float:
    """The largest absolute difference. Raises ExportError if it is too large or NaN."""
    if result.shape != expected.shape:
        raise ExportError(
            f"{what} has the shape {list(result.shape)}, but torch's has {list(expected.shape)}"
        )
    if expected.dtype == np.uint8:  # a value near a half may be rounded either way
        allowed = 1.0 if (result != expected).mean() < MISROUNDED else 0.0
    else:
        change = expected if base is None else expected - base
        allowed = tolerance * float(np.abs(change).max()) + ROUNDING * float(np.abs(expected).max())
    error = float(np.abs(result.astype(np.float32) - expected.astype(np.float32)).max())
    if not np.isfinite(expected).all():
        raise ExportError(f"{what} is not finite in torch: the checkpoint holds NaN or infinities")
    if not error <= allowed:
        raise ExportError(f"{what} differs from torch's by {error:.2g}, more than {allowed:.2g}")
    return error
