"""Real engines; where they would run, a stand-in for the library, and the real one on RTX GPUs."""

import contextlib
import ctypes
import json
import sys
import types

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from build.engine_builder import ShapeRange, build_engine
from runtimes import EngineError, TensorSpec, rtx
from runtimes.rtx import Runtime
from tests import small_graphs

RTX_5090 = ("NVIDIA GeForce RTX 5090", "sm120")
PROFILES = [
    {"x": {"min": [1, 64], "opt": [1, 64], "max": [1, 64]}},
    {"x": {"min": [1, 64], "opt": [4, 64], "max": [8, 64]}},
]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A real engine: <repository>/engine/1/model.rtx for sm120."""
    model = small_graphs.matmul_chain(tmp_path_factory.mktemp("built") / "model.onnx")
    ranges = [
        {"x": ShapeRange(*(tuple(shape) for shape in profile["x"].values()))}
        for profile in PROFILES
    ]
    build_engine(
        model, model.with_suffix(".rtx"), "tensorrt_rtx", "sm120", ranges,
        made_from={"checkpoint": "c0ffee" * 10},
    )  # fmt: skip
    return model.with_suffix(".rtx")


@pytest.fixture
def engine(built, tmp_path):
    folder = tmp_path / "engine" / "1"
    folder.mkdir(parents=True)
    for suffix in (".rtx", ".json"):
        (folder / built.with_suffix(suffix).name).write_bytes(
            built.with_suffix(suffix).read_bytes()
        )
    return folder / built.name


def redescribe(engine, **changes):
    path = engine.with_suffix(".json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_without_a_gpu_the_engines_architecture_is_named(engine, monkeypatch):
    monkeypatch.setattr(rtx, "find_gpu", lambda number: None)
    with pytest.raises(EngineError, match=r"^model.rtx was built for sm120, and torch finds no"):
        Runtime(engine, {})


def test_another_gpus_engine_is_refused(engine, monkeypatch):
    monkeypatch.setattr(rtx, "find_gpu", lambda number: ("NVIDIA GeForce RTX 4090", "sm89"))
    said = r"^model.rtx was built for sm120, and the GPU here, NVIDIA GeForce RTX 4090, is sm89: "
    with pytest.raises(EngineError, match=said):
        Runtime(engine, {})


@pytest.mark.parametrize(
    ("built_by", "said"),
    [
        ({"version": "1.6.0.10"}, r"built by tensorrt_rtx 1\.6\.0\.10, and here is tensorrt_rtx 1"),
        ({"library": "tensorrt", "version": "11.4"}, r"built by tensorrt 11\.4, and here is tens"),
    ],
)
def test_another_versions_engine_is_refused(built_by, said, engine, monkeypatch):
    monkeypatch.setattr(rtx, "find_gpu", lambda number: RTX_5090)
    redescribe(engine, **built_by)
    with pytest.raises(EngineError, match=said):
        Runtime(engine, {})


def test_another_checkpoints_engine_is_refused(engine):
    description = rtx.read_description(engine)
    served = engine.parents[2] / "checkpoint.json"
    served.write_text(json.dumps({"fingerprint": "beef" * 16}))
    said = "made from the checkpoint c0ffeec0ffee, and this repository is of beefbeefbeef: "
    with pytest.raises(EngineError, match=said):
        rtx.check_fit(engine, description, description["version"], RTX_5090)
    served.write_text(json.dumps({"fingerprint": "c0ffee" * 10}))
    rtx.check_fit(engine, description, description["version"], RTX_5090)


def test_the_library_judges_an_engine_that_looks_right(engine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: None)
    monkeypatch.setattr(rtx, "find_gpu", lambda number: RTX_5090)
    engine.write_bytes(b"x" * engine.stat().st_size)
    with pytest.raises(EngineError, match=r"^model.rtx cannot run here: malformed engine$"):
        Runtime(engine, {})


def test_a_missing_library_says_which_one_to_install(engine, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    said = r"needs TensorRT-RTX (\S+), which is not installed .*`pip install tensorrt-rtx==\1`$"
    with pytest.raises(EngineError, match=said):
        Runtime(engine, {})


@pytest.mark.parametrize(
    ("contents", "said"),
    [
        (None, r"model.json, the description of model.rtx, cannot be read \(FileNotFoundError"),
        ("{", r"model.json, the description of model.rtx, cannot be read \(JSONDecodeError"),
        ("[" * 100_000, r"model.json, the description of model.rtx, cannot be read \(Recursion"),
        ("[]", r"model.json does not describe model.rtx: "),
        ('{"bytes": 3}', r"model.json does not describe model.rtx: "),
    ],
)
def test_an_engine_that_is_not_described_is_refused(contents, said, engine):
    path = engine.with_suffix(".json")
    path.unlink()
    if contents is not None:
        path.write_text(contents)
    with pytest.raises(EngineError, match=rf"^{said}[^\n]*run 'make export'$"):
        Runtime(engine, {})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bytes": 3}, r"model.rtx has \d+ bytes, and model.json describes one of 3: "),
        ({"made_from": None}, "model.json does not describe model.rtx: "),
        ({"made_from": {"checkpoint": 3}}, "model.json does not describe model.rtx: "),
        ({"inputs": {"x": {}}}, "model.json does not describe model.rtx: "),
        ({"outputs": {"y": None}}, "model.json does not describe model.rtx: "),
        ({"profiles": [{}]}, "model.json does not describe model.rtx: "),
        ({"profiles": [{"x": {"min": [1, 64]}}]}, "model.json does not describe model.rtx: "),
    ],
)
def test_a_description_that_was_edited_is_refused(changes, said, engine):
    redescribe(engine, **changes)
    with pytest.raises(EngineError, match=rf"^{said}[^\n]*run 'make export'$"):
        Runtime(engine, {})


@pytest.mark.parametrize("text", ["", "[]", '{"fingerprint": null}'])
def test_a_checkpoint_file_that_was_edited_is_refused(text, engine):
    description = rtx.read_description(engine)
    (engine.parents[2] / "checkpoint.json").write_text(text)
    with pytest.raises(EngineError, match=r"checkpoint\.json (is|has) no .*run 'make export'$"):
        rtx.check_fit(engine, description, description["version"], RTX_5090)


def test_borders_that_do_not_pass_through_triton_are_refused():
    assert rtx.tensor_specs({"x": {"dtype": "BF16"}, "m": {"dtype": "BOOL"}}) == [
        TensorSpec("x", "BF16"),
        TensorSpec("m", "BOOL"),
    ]
    with pytest.raises(EngineError, match=r"^x is FP8, which does not pass .*FP32, FP16, BF16"):
        rtx.tensor_specs({"x": {"dtype": "FP8"}})


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"cuda_graphs": "yes"}, "cuda_graphs is 'yes'; it must be true or false"),
        ({"runtime_cache": "/nowhere/cache"}, "'/nowhere/cache', and its folder cannot be written"),
        ({"weights_on_gpu_mib": "half"}, "weights_on_gpu_mib is 'half'; it must be a whole number"),
        ({"weights_on_gpu_mib": "9"}, "the engine was built without weight streaming"),
    ],
)
def test_wrong_parameters_are_refused(parameters, said, engine):
    with pytest.raises(EngineError, match=said):
        Runtime(engine, parameters)


def test_the_first_profile_that_holds_the_shapes_is_taken():
    assert rtx.choose_profile(PROFILES, {"x": (1, 64)}) == 0
    assert rtx.choose_profile(PROFILES, {"x": (8, 64)}) == 1


@pytest.mark.parametrize("shape", [(9, 64), (0, 64), (1, 63), (64,), (1, 64, 1)])
def test_shapes_outside_the_profiles_are_refused_with_what_is_allowed(shape):
    with pytest.raises(EngineError) as failure:
        rtx.choose_profile(PROFILES, {"x": shape})
    assert str(failure.value) == (
        f"the engine does not take x {list(shape)}; it takes x [1, 64] to [1, 64] "
        "or x [1, 64] to [8, 64]"
    )


def test_inputs_that_fit_no_profile_together_are_all_named():
    def bounds(*sizes):
        return {"min": list(sizes), "opt": list(sizes), "max": list(sizes)}

    profiles = [
        {"a": bounds(1), "b": bounds(1), "c": bounds(5)},
        {"a": bounds(2), "b": bounds(2), "c": bounds(5)},
    ]
    with pytest.raises(EngineError, match=r"take a \[1\], b \[2\], c \[5\]; it takes a \[1\] to "):
        rtx.choose_profile(profiles, {"a": (1,), "b": (2,), "c": (5,)})
    with pytest.raises(EngineError, match=r"take b \[3\]; it takes b \[1\] to \[1\] or b \[2\] to"):
        rtx.choose_profile(profiles, {"a": (1,), "b": (3,), "c": (5,)})


class StandInContext:
    """y = 2x and positive = x > 0, computed at the addresses that it was given."""

    def __init__(self, log, config):
        self._log, self.config = log, config
        self.active_optimization_profile = 0
        self.fails = False
        self._shape = None
        self._addresses = {}
        self.seen = []  # profile and addresses of every run

    def set_optimization_profile_async(self, number, stream):
        self.active_optimization_profile = number
        return True

    def set_input_shape(self, name, shape):
        self._shape = tuple(shape)
        return True

    def infer_shapes(self):
        return []

    def get_tensor_shape(self, name):
        return self._shape

    def set_tensor_address(self, name, address):
        self._addresses[name] = address
        return True

    def execute_async_v3(self, stream):
        if self.fails:
            self._log.log("ERROR", "Cuda Runtime (an illegal\n memory access)")
            return False
        x, y, positive = (
            np.ctypeslib.as_array(
                ctypes.cast(self._addresses[name], ctypes.POINTER(ctype)), self._shape
            )
            for name, ctype in (
                ("x", ctypes.c_float),
                ("y", ctypes.c_float),
                ("positive", ctypes.c_bool),
            )
        )
        y[...] = 2 * x
        positive[...] = x > 0
        self.seen.append((self.active_optimization_profile, dict(self._addresses)))
        return True


class StandInCache:
    def __init__(self):
        self.kernels = b""

    def deserialize(self, data):
        self.kernels = data
        return True

    def serialize(self):
        return self.kernels + b"k"


@pytest.fixture
def stand_in(engine, monkeypatch):
    """Runtime with stand-ins: a library of the real one's interface, and torch's CPU as GPU."""
    made = types.SimpleNamespace()

    class Config:
        cuda_graph_strategy = "DISABLED"

        def create_runtime_cache(self):
            return StandInCache()

        def set_runtime_cache(self, cache):
            self.cache = cache

    class Engine:
        def create_runtime_config(self):
            return Config()

        def create_execution_context(self, config):
            made.context = StandInContext(made.log, config)
            return made.context

    class Library:
        def __init__(self, log):
            made.log, made.engine = log, Engine()

        def get_engine_validity(self, data):
            return "VALID", 0

        def deserialize_cuda_engine(self, data):
            return made.engine

    library = types.ModuleType("tensorrt_rtx")
    library.__version__ = json.loads(engine.with_suffix(".json").read_text())["version"]
    library.ILogger = type("ILogger", (), {"ERROR": "ERROR", "INTERNAL_ERROR": "INTERNAL_ERROR"})
    library.Runtime = Library
    library.EngineValidity = types.SimpleNamespace(INVALID="INVALID")
    library.CudaGraphStrategy = types.SimpleNamespace(WHOLE_GRAPH_CAPTURE="WHOLE_GRAPH_CAPTURE")
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", library)
    monkeypatch.setattr(rtx, "find_gpu", lambda number: RTX_5090)

    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, device, **rest: empty(*sizes, **rest))
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: None)
    stream = types.SimpleNamespace(cuda_stream=7, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())

    outputs = {"y": {"dtype": "FP32"}, "positive": {"dtype": "BOOL"}}
    redescribe(engine, outputs=outputs, weight_streaming=True)
    made.start = lambda parameters=(): Runtime(engine, dict(parameters))
    return made


def test_batches_of_any_size_run_in_their_profile(stand_in):
    runtime = stand_in.start()
    assert runtime.inputs == [TensorSpec("x", "FP32")]
    assert runtime.outputs == [TensorSpec("y", "FP32"), TensorSpec("positive", "BOOL")]
    kept = []
    for rows in (4, 1, 2, 8, 3):
        x = torch.arange(rows * 64, dtype=torch.float32).reshape(rows, 64) - 5
        kept.append((x, runtime.run({"x": x})))
    for x, outputs in kept:  # what was returned is nobody else's
        assert torch.equal(outputs["y"], 2 * x)
        assert torch.equal(outputs["positive"], x > 0)
    profiles, addresses = zip(*stand_in.context.seen, strict=True)
    assert profiles == (1, 0, 1, 1, 1)
    # Memory moves only when it grows, from 4 rows to 8.
    assert addresses[0] == addresses[1] == addresses[2] != addresses[3] == addresses[4]


def test_shapes_are_judged_before_anything_runs(stand_in):
    runtime = stand_in.start()
    with pytest.raises(EngineError, match=r"does not take x \[9, 64\]; it takes x \[1, 64\] to "):
        runtime.run({"x": torch.zeros(9, 64)})
    assert not stand_in.context.seen


def test_a_failed_run_is_one_sentence_with_the_librarys_error(stand_in):
    runtime = stand_in.start()
    stand_in.context.fails = True
    said = r"^the engine failed: Cuda Runtime \(an illegal memory access\)$"
    with pytest.raises(EngineError, match=said):
        runtime.run({"x": torch.zeros(1, 64)})


def test_graphs_cache_and_weight_budget_are_configured(stand_in, engine, tmp_path):
    runtime = stand_in.start()
    assert stand_in.context.config.cuda_graph_strategy == "WHOLE_GRAPH_CAPTURE"
    assert not hasattr(stand_in.engine, "weight_streaming_budget_v2")
    cache = engine.with_name("model.cache")
    assert cache.read_bytes() == b"k"
    runtime.close()
    assert cache.read_bytes() == b"k"
    stand_in.start()
    assert stand_in.context.config.cache.kernels == b"k"
    assert cache.read_bytes() == b"kk"
    elsewhere = tmp_path / "kernels"
    stand_in.start(
        {"runtime_cache": str(elsewhere), "cuda_graphs": "false", "weights_on_gpu_mib": "3"}
    )
    assert stand_in.context.config.cuda_graph_strategy == "DISABLED"
    assert stand_in.engine.weight_streaming_budget_v2 == 3 * 1024**2
    assert elsewhere.read_bytes() == b"k"
    assert {path.name for path in engine.parent.iterdir()} == {
        "model.rtx", "model.json", "model.cache",
    }  # fmt: skip


def test_a_repository_that_cannot_be_written_does_not_matter(stand_in, monkeypatch):
    def refuse(path, data):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(rtx.Path, "write_bytes", refuse)
    stand_in.start().close()


@pytest.mark.skipif(
    (rtx.find_gpu(0) or ("", ""))[1] not in ("sm86", "sm89", "sm120", "sm121"),
    reason="needs an RTX GPU",
)
def test_an_rtx_gpu_computes_what_numpy_does(tmp_path):
    model = small_graphs.matmul_chain(tmp_path / "model.onnx")
    weight = torch.tensor(numpy_helper.to_array(onnx.load(model).graph.initializer[0]))
    rows = {"x": ShapeRange((1, 64), (4, 64), (8, 64))}
    build_engine(model, model.with_suffix(".rtx"), "tensorrt_rtx", None, [rows])
    runtime = Runtime(model.with_suffix(".rtx"), {})
    for count in (1, 8, 3, 3):
        x = torch.randn(count, 64, generator=torch.Generator().manual_seed(count))
        # TensorRT multiplies FP32 as TF32, with ten bits of mantissa.
        y = runtime.run({"x": x})["y"].cpu()
        torch.testing.assert_close(y, x @ weight @ weight, atol=0.02, rtol=0)
    runtime.close()
    assert (tmp_path / "model.cache").stat().st_size > 0
