"""Real builds by TensorRT-RTX, which need no GPU; TensorRT itself needs one."""

import json
import logging
import signal
import sys
import threading
import time

import pytest
import tensorrt_rtx
from onnx import TensorProto, helper

from build import engine_builder
from build.engine_builder import (
    Gpu,
    ShapeRange,
    build_engine,
    complete_profiles,
    find_machine,
)
from build.profile import BuildError
from tests import small_graphs

VERSION = tensorrt_rtx.__version__
ROWS = {"x": ShapeRange((1, 64), (16, 64), (128, 64))}


def build(model, output=None, target="sm120", profiles=(ROWS,), **options):
    output = output or model.with_suffix(".rtx")
    return build_engine(model, output, "tensorrt_rtx", target, profiles, **options)


@pytest.fixture
def chain(tmp_path):
    return small_graphs.matmul_chain(tmp_path / "chain" / "model.onnx")


def test_an_engine_and_its_description_are_written(chain):
    reported = []
    made_from = {"engine": "chain", "precision": "fp32", "checkpoint": "c0ffee"}
    description = build(
        chain, made_from=made_from, progress=lambda *progress: reported.append(progress)
    )
    engine = chain.with_suffix(".rtx")
    assert json.loads(chain.with_suffix(".json").read_text()) == description
    assert description["seconds"] >= 0
    assert {key: value for key, value in description.items() if key != "seconds"} == {
        "name": f"chain fp32 c0ffee tensorrt_rtx {VERSION} sm120",
        "library": "tensorrt_rtx",
        "version": VERSION,
        "target": "sm120",
        "device": None,
        "made_from": made_from,
        "weight_streaming": False,
        "inputs": {"x": {"dtype": "FP32", "shape": [-1, 64]}},
        "outputs": {"y": {"dtype": "FP32", "shape": [-1, 64]}},
        "profiles": [{"x": {"min": [1, 64], "opt": [16, 64], "max": [128, 64]}}],
        "bytes": engine.stat().st_size,
    }
    assert description["name"].encode() in engine.read_bytes()
    assert {name.name for name in chain.parent.iterdir()} == {
        "model.onnx",
        "model.rtx",
        "model.json",
    }
    percents = [done for _, done, _ in reported]
    assert percents == sorted(percents)
    assert percents[-1] == 100
    assert {(what, total) for what, _, total in reported} == {("chain: build for sm120", 100)}


@pytest.mark.parametrize(
    ("graph", "targets", "dtype"),
    [
        (lambda path: small_graphs.matmul_chain(path, TensorProto.BFLOAT16), ["sm120"], "BF16"),
        (small_graphs.fp8_matmul, ["sm89", "sm120"], "FP16"),
        (small_graphs.nvfp4_matmul, ["sm120", "sm121"], "BF16"),
    ],
)
def test_reduced_precisions_build_for_the_gpus_that_have_them(graph, targets, dtype, tmp_path):
    model = graph(tmp_path / "model.onnx")
    for target in targets:
        description = build(model, target=target)
        assert description["target"] == target
        assert description["inputs"]["x"]["dtype"] == dtype


@pytest.mark.parametrize(
    ("graph", "target", "dtype"),
    [(small_graphs.fp8_matmul, "sm86", "fp8"), (small_graphs.nvfp4_matmul, "sm89", "fp4")],
)
def test_a_precision_that_the_gpu_lacks_is_refused(graph, target, dtype, tmp_path):
    model = graph(tmp_path / "model.onnx")
    with pytest.raises(BuildError, match=rf"^[^\n]*cannot build .* for {target}: [^\n]*{dtype}"):
        build(model, target=target)
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


def test_a_build_after_a_failed_one_has_its_own_reason(chain, tmp_path, caplog):
    with pytest.raises(BuildError, match="Turing") as first:
        build(chain, target="sm75")
    with pytest.raises(BuildError, match="fp4"):
        build(small_graphs.nvfp4_matmul(tmp_path / "model.onnx"), target="sm89")
    assert first.value.__traceback__ is not None  # holds the first builder, and that its logger
    assert "new logger is ignored" not in caplog.text


def test_the_reason_is_the_last_error_that_tells_something():
    echo = "[checkMacros.cpp::catchCudaError::250] Error Code 1: Cuda Runtime (no driver)"
    assert engine_builder._reason(["first", "second", echo]) == "second"
    assert engine_builder._reason([echo]) == echo
    assert engine_builder._reason([]) == "it gives no reason"


def test_several_profiles_are_kept_in_order(chain):
    one = {"x": ShapeRange((1, 64), (1, 64), (1, 64))}
    description = build(chain, profiles=[one, ROWS])
    assert [profile["x"]["max"] for profile in description["profiles"]] == [[1, 64], [128, 64]]


def test_fixed_shapes_need_no_profile(tmp_path):
    node = helper.make_node("Relu", ["x"], ["y"])
    graph = helper.make_graph(
        [node],
        "fixed",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 3])],
    )
    model = tmp_path / "model.onnx"
    model.write_bytes(helper.make_model(graph, ir_version=10).SerializeToString())
    bounds = {"min": [2, 3], "opt": [2, 3], "max": [2, 3]}
    assert build(model, profiles=[])["profiles"] == [{"x": bounds}]


def test_external_data_is_found_and_its_absence_named(tmp_path):
    model = small_graphs.matmul_chain(
        tmp_path / "model.onnx", save_as_external_data=True, location="weights", size_threshold=0
    )
    assert model.stat().st_size < 1000
    assert build(model)["bytes"] > 10_000
    (tmp_path / "weights").unlink()
    with pytest.raises(BuildError, match=r"cannot read .*Failed to open file: .*/weights$"):
        build(model)


def test_weights_can_be_streamed(chain):
    assert build(chain, weight_streaming=True)["weight_streaming"] is True


def test_unknown_nodes_are_named(tmp_path):
    model = small_graphs.unknown_nodes(tmp_path / "model.onnx", 5)
    said = r"node_0 \(Mystery\) INVALID_NODE: [^\n]*; node_1 \(Mystery\)[^\n]*; and 2 more$"
    with pytest.raises(BuildError, match=said):
        build(model)


@pytest.mark.parametrize(
    ("contents", "said"),
    [
        (b"", "it holds no ONNX graph"),
        (b"not a graph", "Failed to parse the ONNX model"),
        (None, "Input file cannot be found"),
    ],
)
def test_what_is_no_graph_is_refused(contents, said, tmp_path):
    model = tmp_path / "model.onnx"
    if contents is not None:
        model.write_bytes(contents)
    with pytest.raises(BuildError, match=rf"^TensorRT-RTX cannot read .*/model.onnx: .*{said}"):
        build(model)


@pytest.mark.parametrize(
    ("profiles", "said"),
    [
        ([], r"the input x has free dimensions, \[-1, 64\], but profile 0 has no range for it"),
        ([ROWS, {}], "profile 1 has no range for it"),
        ([{**ROWS, "z": ROWS["x"]}], "a range for z, which is no input of the graph; .* are x$"),
        ([{"x": ShapeRange((4, 64), (2, 64), (8, 64))}], "at least 1 and must not fall"),
        ([{"x": ShapeRange((1, 64), (2, 64), (1, 64))}], "at least 1 and must not fall"),
        ([{"x": ShapeRange((0, 64), (1, 64), (1, 64))}], "at least 1 and must not fall"),
        ([{"x": ShapeRange((1, 32), (2, 32), (4, 32))}], r"x from \[1, 32\].*has \[-1, 64\]$"),
        ([{"x": ShapeRange((1, 64), (2, 64), (4, 128))}], r"x from \[1, 64\].*has \[-1, 64\]$"),
        ([{"x": ShapeRange((1,), (2,), (4,))}], r"the graph has \[-1, 64\]$"),
    ],
)
def test_a_wrong_range_names_the_tensor(profiles, said):
    with pytest.raises(BuildError, match=said):
        complete_profiles({"x": (-1, 64)}, profiles)


def test_the_builder_checks_ranges_before_it_builds(chain):
    with pytest.raises(BuildError, match="no range for it"):
        build(chain, profiles=[])


@pytest.mark.parametrize("target", ["sm90", "b300"])
def test_an_unknown_target_lists_those_there_are(target, chain):
    with pytest.raises(BuildError, match=rf"for '{target}'; its targets are .*sm89, sm120"):
        build(chain, target=target)


def test_the_target_may_be_the_machines_gpu(chain, monkeypatch):
    monkeypatch.setattr(engine_builder, "find_gpu", lambda: None)
    with pytest.raises(BuildError, match="needs a target, as torch finds no GPU"):
        build(chain, target=None)
    monkeypatch.setattr(engine_builder, "find_gpu", lambda: Gpu("NVIDIA RTX 4090", "sm89"))
    assert build(chain, target=None)["target"] == "sm89"
    monkeypatch.setattr(engine_builder, "find_gpu", lambda: Gpu("NVIDIA H200", "sm90"))
    with pytest.raises(BuildError, match="does not build for 'sm90'"):
        build(chain, target=None)


@pytest.mark.parametrize(
    ("library", "said"),
    [
        ("tensorrt", r"TensorRT is not installed .*nvidia/tensorrt:<yy.mm>-py3.*`pip"),
        ("tensorrt_rtx", r"TensorRT-RTX is not installed .*`pip install tensorrt-rtx`$"),
    ],
)
def test_a_missing_library_says_where_to_get_it(library, said, chain, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(BuildError, match=said):
        build_engine(chain, chain.with_suffix(".out"), library, "sm120", [ROWS])


OTHERS = {"tensorrt sm90": ["h200"], "tensorrt sm103": ["b300", "b300-fp8"]}


def machine(library, targets, wanted=None):
    return find_machine(library, targets, wanted, OTHERS)


@pytest.mark.parametrize(
    ("gpu", "targets", "wanted", "found"),
    [
        (None, ("sm120", "sm89"), "sm89", "sm89"),
        (None, ("sm120",), None, "sm120"),
        (Gpu("RTX 4090", "sm89"), ("sm120", "sm89"), None, "sm89"),
        (Gpu("RTX 4090", "sm89"), ("sm120", "sm89"), "sm120", "sm120"),
        (Gpu("H200", "sm90"), ("sm120",), None, "sm120"),
    ],
)
def test_rtx_compiles_for_what_is_named_or_here(gpu, targets, wanted, found, monkeypatch):
    monkeypatch.setattr(engine_builder, "find_gpu", lambda: gpu)
    assert machine("tensorrt_rtx", targets, wanted) == ("tensorrt_rtx", VERSION, found, None)


def test_rtx_asks_for_a_target_where_there_are_several(monkeypatch):
    monkeypatch.setattr(engine_builder, "find_gpu", lambda: Gpu("H200", "sm90"))
    said = (
        "compiles for sm120 or sm89, and the GPU here, H200, is sm90: name one, as in TARGET=sm12"
    )
    with pytest.raises(BuildError, match=said):
        machine("tensorrt_rtx", ("sm120", "sm89"))


@pytest.fixture
def tensorrt(monkeypatch):
    """TensorRT-RTX under the name of TensorRT: its API, without the other's need of a GPU."""
    monkeypatch.setitem(sys.modules, "tensorrt", tensorrt_rtx)
    return Gpu("NVIDIA B300", "sm103")


def test_tensorrt_needs_the_gpu_that_it_builds_for(tensorrt, chain, monkeypatch):
    monkeypatch.setattr(engine_builder, "find_gpu", lambda: None)
    with pytest.raises(BuildError, match="the GPU that will run the engine, and torch finds none"):
        build_engine(chain, chain.with_suffix(".plan"), "tensorrt", None, [ROWS])
    monkeypatch.setattr(engine_builder, "find_gpu", lambda: tensorrt)
    with pytest.raises(BuildError, match=r"wanted for sm100, .* NVIDIA B300, which is sm103$"):
        build_engine(chain, chain.with_suffix(".plan"), "tensorrt", "sm100", [ROWS])


def test_tensorrt_is_for_the_gpu_in_the_machine(tensorrt, monkeypatch):
    monkeypatch.setattr(engine_builder, "find_gpu", lambda: tensorrt)
    expected = ("tensorrt", VERSION, "sm103", "NVIDIA B300")
    assert machine("tensorrt", ("sm100", "sm103")) == expected
    assert machine("tensorrt", ("sm103",), "sm103") == expected
    with pytest.raises(
        BuildError, match=r"B300 \(sm103\), .* for sm90: .*PROFILE=b300 or b300-fp8"
    ):
        machine("tensorrt", ("sm90",))
    with pytest.raises(BuildError, match=r"is NVIDIA B300 \(sm103\), .* are wanted for sm100: run"):
        machine("tensorrt", ("sm100", "sm103"), "sm100")
    monkeypatch.setattr(engine_builder, "find_gpu", lambda: Gpu("NVIDIA L4", "sm89"))
    with pytest.raises(BuildError, match=r"wanted for sm90: run this where such a GPU is$"):
        machine("tensorrt", ("sm90",))
    monkeypatch.setattr(engine_builder, "find_gpu", lambda: None)
    with pytest.raises(BuildError, match=r"torch finds none here: .* with `--gpus all`$"):
        machine("tensorrt", ("sm90",))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of RTX: it times nothing
@pytest.mark.parametrize("before", [None, b"", b"another version's"])
def test_tensorrt_reads_and_writes_the_timing_cache(before, tensorrt, chain, monkeypatch):
    monkeypatch.setattr(engine_builder, "find_gpu", lambda: tensorrt)
    cache = chain.with_name("timing.cache")
    if before is not None:
        cache.write_bytes(before)
    description = build_engine(
        chain, chain.with_suffix(".plan"), "tensorrt", None, [ROWS], timing_cache=cache
    )
    assert (description["target"], description["device"]) == ("sm103", "NVIDIA B300")
    assert description["name"] == f"tensorrt {VERSION} NVIDIA B300"
    assert len(cache.read_bytes()) > 100


def test_messages_go_to_logging(chain, caplog):
    with caplog.at_level(logging.DEBUG, logger=engine_builder.__name__):
        build(chain)
        levels = {record.levelno for record in caplog.records}
        assert logging.INFO in levels
        assert logging.DEBUG not in levels
        build(chain, verbose=True)
    assert logging.DEBUG in {record.levelno for record in caplog.records}


def test_an_interrupted_build_leaves_nothing_new(chain, monkeypatch):
    build(chain)
    before = {path.name: path.read_bytes() for path in chain.parent.iterdir()}
    steps, monitors = [], []
    made = engine_builder._monitor
    monkeypatch.setattr(
        engine_builder, "_monitor", lambda *args: monitors.append(made(*args)) or monitors[-1]
    )

    def interrupt(*progress):
        steps.append(progress)
        if len(steps) == 30:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            while not monitors[-1].cancelled:  # until the other thread has seen it
                time.sleep(0.01)

    with pytest.raises(KeyboardInterrupt):
        build(chain, progress=interrupt)
    assert len(steps) == 30
    assert {path.name: path.read_bytes() for path in chain.parent.iterdir()} == before


def test_a_file_that_cannot_be_written_leaves_nothing(chain, monkeypatch):
    def fail(path, data):
        with path.open("wb") as file:
            file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(engine_builder.Path, "write_bytes", fail)
    with pytest.raises(OSError, match="No space left"):
        build(chain)
    assert [path.name for path in chain.parent.iterdir()] == ["model.onnx"]


# The other two hold FP32 attention, which TensorRT-RTX has not.
@pytest.mark.parametrize(
    ("engine", "profile"),
    [
        ("modulation", {"timestep": ShapeRange((1, 1), (20, 1), (32, 1))}),
        ("vae_decoder", {"latents": ShapeRange((1, 16, 4, 4), (1, 16, 8, 8), (4, 16, 16, 16))}),
    ],
)
def test_exported_engines_build(engine, profile, repository, tmp_path):
    model = repository / "model_repository" / engine / "1" / "model.onnx"
    description = build(model, tmp_path / "model.rtx", profiles=[profile])
    exported = json.loads((repository / "manifest.json").read_text())["engines"][engine]
    assert description["inputs"] == exported["inputs"]
    assert description["outputs"].keys() == exported["outputs"].keys()
    assert [t["dtype"] for t in description["outputs"].values()] == [
        t["dtype"] for t in exported["outputs"].values()
    ]
