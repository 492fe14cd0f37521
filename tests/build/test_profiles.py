"""Profiles, the models' configurations and the graphs say the same of every engine."""

import copy
import itertools
from pathlib import Path

import onnx
import pytest
import yaml
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from build.profile import (
    PROFILES,
    SIZES,
    BuildError,
    load_profile,
    parse_profile,
    profile_names,
    with_dit_precision,
)
from build.shapes import complete_sizes, graph_inputs, optimization_profiles
from export.graph import ExportError
from export.recipe import load_recipe
from serving.limits import check_limits
from tests.conftest import ROOT

MODELS = ROOT / "model_repository"
DROPPED_TOKENS = 34  # by QwenImagePipeline's template
BUILT = [name for name in profile_names() if load_profile(name).builder]
# ONNX's names of dtypes → Triton's.
DTYPES = {"FLOAT": "FP32", "BFLOAT16": "BF16"}


def config(profile, model):
    path = MODELS / model / "configs" / f"{profile}.pbtxt"
    if not path.is_file():
        path = MODELS / model / "config.pbtxt"
    return text_format.Parse(path.read_text(encoding="utf-8"), model_config_pb2.ModelConfig())


def parameter(profile, model, name):
    return config(profile, model).parameters[name].string_value


def tensors_of_graph(values):
    """name → (Triton's dtype, dimensions behind the batch; free ones −1)."""
    result = {}
    for value in values:
        tensor = value.type.tensor_type
        dtype = onnx.TensorProto.DataType.Name(tensor.elem_type)
        batch, *dims = tensor.shape.dim
        assert batch.dim_param == "batch", value.name
        shape = [-1 if dim.dim_param else dim.dim_value for dim in dims]
        result[value.name] = (DTYPES.get(dtype, dtype), shape)
    return result


@pytest.mark.parametrize("engine", SIZES)
@pytest.mark.parametrize("profile", profile_names())
def test_configuration_graph_and_profile_agree(profile, engine, converted):
    described, found = load_profile(profile), config(profile, engine)
    made = described.engines[engine]
    model = converted(made.precision, engine, described.compute or "bf16") / "model.onnx"
    graph = onnx.load(model, load_external_data=False).graph
    for declared, values in ((found.input, graph.input), (found.output, graph.output)):
        actual = tensors_of_graph(values)
        assert {tensor.name for tensor in declared} == actual.keys()
        for tensor in declared:
            dtype, shape = actual[tensor.name]
            assert model_config_pb2.DataType.Name(tensor.data_type) == f"TYPE_{dtype}"
            assert len(tensor.dims) == len(shape)
            # A width that the checkpoint decides is −1 in the configuration.
            for size, fixed in zip(tensor.dims, shape, strict=True):
                assert size in (-1, fixed), tensor.name
    backend = "tensorrt" if made.runtime == "tensorrt" else "engine"
    assert found.backend == backend
    assert (found.default_model_filename == made.artifact) == (backend == "tensorrt")
    (group,) = found.instance_group
    on_gpu = group.kind == model_config_pb2.ModelInstanceGroup.KIND_GPU
    assert on_gpu == described.on_gpu
    # The backend `engine` chooses among an engine's profiles itself.
    expected = [str(i) for i in range(len(made.shapes))] if backend == "tensorrt" else []
    assert list(group.profile) == expected
    if made.shapes:
        assert found.max_batch_size == max(sizes["batch"][2] for sizes in made.shapes)
        assert min(sizes["batch"][0] for sizes in made.shapes) == 1


@pytest.mark.parametrize("profile", BUILT)
def test_captured_graphs_have_shapes_that_an_engine_takes(profile, converted):
    for name, engine in load_profile(profile).engines.items():
        specs = config(profile, name).optimization.cuda.graph_spec
        model = converted(engine.precision, name, "bf16") / "model.onnx"
        ranges = optimization_profiles(engine, graph_inputs(model), DROPPED_TOKENS)
        # Triton captures every one for every optimization profile.
        for spec, inputs in itertools.product(specs, ranges):
            assert set(spec.input) == set(inputs)
            for tensor, bounds in inputs.items():
                shape = (spec.batch_size, *spec.input[tensor].dim)
                within = zip(bounds.min, shape, bounds.max, strict=True)
                assert all(low <= size <= high for low, size, high in within), (name, shape)
    lengths = {
        spec.input["input_ids"].dim[0]
        for spec in config(profile, "text_encoder").optimization.cuda.graph_spec
    }
    assert lengths <= {DROPPED_TOKENS + bucket for bucket in text_buckets(profile)}


def text_buckets(profile):
    return [int(bucket) for bucket in parameter(profile, "denoise", "text_buckets").split(",")]


@pytest.mark.parametrize("profile", BUILT)
def test_engines_take_whatever_the_limits_let_through(profile):
    engines = load_profile(profile).engines
    lowest, side, pixels = (
        int(parameter(profile, "tokenize", name)) for name in ("min_side", "max_side", "max_pixels")
    )

    def takes(engine, size, *values):
        return all(
            any(sizes[size][0] <= value <= sizes[size][2] for sizes in engines[engine].shapes)
            for value in values
        )

    for size in ("height", "width"):
        assert takes("vae_decoder", size, lowest // 8, side // 8)
    assert takes("dit", "image_tokens", (lowest // 16) ** 2, pixels // 256)
    for engine in ("dit", "text_encoder"):
        assert takes(engine, "text_tokens", *text_buckets(profile), 1024)
    check_limits(MODELS, profile)


@pytest.mark.parametrize("profile", profile_names())
def test_denoise_speaks_the_type_of_the_engines_and_sits_with_them(profile):
    (hidden,) = (
        tensor for tensor in config(profile, "dit").input if tensor.name == "hidden_states"
    )
    dtype = model_config_pb2.DataType.Name(hidden.data_type)
    assert f"TYPE_{parameter(profile, 'denoise', 'engine_dtype') or 'FP32'}" == dtype
    (group,) = config(profile, "denoise").instance_group
    kinds = model_config_pb2.ModelInstanceGroup
    expected = (
        ("cuda:0", kinds.KIND_GPU, [0]) if dtype == "TYPE_BF16" else ("cpu", kinds.KIND_CPU, [])
    )
    device = parameter(profile, "denoise", "engine_device") or "cpu"
    assert (device, group.kind, list(group.gpus)) == expected


def test_sizes_that_follow_from_others():
    sizes = {"batch": (1, 2, 8), "image_tokens": (4, 5, 6), "text_tokens": (1, 2, 3)}
    complete = complete_sizes(sizes, 34)
    assert complete == {**sizes, "tokens": (35, 36, 37), "all_tokens": (5, 7, 9)}


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (["targts"], [], r"profile 'rtx': 'targts' is unknown: did you mean targets\?"),
        (["compute"], "fp64", "compute is 'fp64'; it must be one of fp32, bf16"),
        (["targets"], [], r"targets is \[\]; it must list architectures such as sm120"),
        (["targets"], ["120"], r"targets is \['120'\]; it must list"),
        (["targets"], ["sm120", "sm120"], r"targets is .*it must list architectures .*, each once"),
        (["targets"], "sm120", r"targets is 'sm120'; it must list"),
        (["engines", "ditt"], {}, r"engines: 'ditt' is unknown: did you mean dit\?"),
        (["engines", "dit"], None, "dit must hold names and values, not None"),
        (["engines", "dit", "preccision"], "fp8", "'preccision' is unknown: did you mean precis"),
        (["engines", "dit", "runtime"], "cuda", "runtime is 'cuda'; it must be one of onnx"),
        (["engines", "dit", "runtime"], ["rtx"], r"runtime is \['rtx'\]; it must be one of onnx"),
        (["engines", "dit", "runtime"], {"a": 1}, "runtime is {'a': 1}; it must be one of onnx"),
        (["engines", "dit", "artifact"], "model.plan", "'model.plan'; that of rtx is model.rtx"),
        (["engines", "dit", "precision"], "fp6", "neither fp32 nor a recipe: .* 'fp6'; the rec"),
        (["engines", "modulation", "precision"], "fp8", "'fp8' has nothing for this engine"),
        (["engines", "dit", "weight_streaming"], "yes", "weight_streaming is 'yes'; it must be"),
        (["engines", "dit", "shapes"], [], "shapes must list optimization profiles"),
        (["engines", "dit", "shapes", 0, "hight"], [1, 2, 3], "dit, shapes 0: 'hight' is unkno"),
        (["engines", "dit", "shapes", 0, "batch"], [1, 4, 2], r"batch is \[1, 4, 2\]; it must"),
        (
            ["engines", "dit", "shapes", 0, "batch"],
            [0, 1, 2],
            r"from 1 to 1048576 and in this order",
        ),
        (["engines", "dit", "shapes", 0, "batch"], [1, 2, 10**9], r"from 1 to 1048576 and in"),
        (["engines", "dit", "shapes", 0, "batch"], [1, 2], "smallest, optimized for, largest"),
        (["engines", "dit", "shapes", 0, "batch"], [1, 2, "8"], "smallest, optimized for"),
    ],
)
def test_a_wrong_profile_gets_a_sentence(path, value, said):
    data = yaml.safe_load((PROFILES / "rtx.yaml").read_text(encoding="utf-8"))
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(BuildError, match=said) as error:
        parse_profile("rtx", data)
    assert "\n" not in str(error.value)


def test_what_a_profile_lacks_is_named():
    data = yaml.safe_load((PROFILES / "rtx.yaml").read_text(encoding="utf-8"))
    for path in (["description"], ["engines", "dit"], ["engines", "dit", "artifact"]):
        changed = copy.deepcopy(data)
        place = changed
        for key in path[:-1]:
            place = place[key]
        del place[path[-1]]
        with pytest.raises(BuildError, match=f"lacks {path[-1]}$"):
            parse_profile("rtx", changed)


def test_shapes_belong_to_engines_that_are_built_and_one_library_builds_them():
    data = yaml.safe_load((PROFILES / "rtx.yaml").read_text(encoding="utf-8"))
    data["engines"]["vae_decoder"] |= {"runtime": "onnx", "artifact": "model.onnx"}
    with pytest.raises(BuildError, match="be absent where it is not"):
        parse_profile("rtx", data)
    data["engines"]["vae_decoder"] |= {"runtime": "tensorrt", "artifact": "model.plan"}
    with pytest.raises(BuildError, match="built by tensorrt and rtx; choose one"):
        parse_profile("rtx", data)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"engines: {", "is no YAML: "),
        (b"created: 2026-13-45", "is no YAML: month must be"),
        (b"[" * 10_000, "is no YAML: "),
        ("description: für".encode("latin-1"), "is no text in UTF-8$"),
    ],
)
def test_a_file_that_is_no_yaml_is_named(data, said, tmp_path, monkeypatch):
    monkeypatch.setattr("build.profile.PROFILES", tmp_path)
    monkeypatch.setattr("export.recipe.RECIPES", tmp_path)
    Path(tmp_path, "odd.yaml").write_bytes(data)
    for load, error in ((load_profile, BuildError), (load_recipe, ExportError)):
        with pytest.raises(error, match=rf"odd\.yaml {said}") as caught:
            load("odd")
        assert "\n" not in str(caught.value)


def test_another_recipe_for_the_dit():
    profile = load_profile("h200-torch")
    changed = with_dit_precision(profile, "fp8-rows-all")
    assert changed.engines["dit"].precision == "fp8-rows-all"
    assert changed.arguments == "PROFILE=h200-torch DIT_PRECISION=fp8-rows-all"
    assert profile.arguments == "PROFILE=h200-torch"
    assert with_dit_precision(changed, profile.engines["dit"].precision) == profile


@pytest.mark.parametrize(
    ("profile", "recipe", "said"),
    [
        ("h200-torch", "fp9", "precision is neither fp32 nor a recipe: there is no recipe 'fp9'"),
        ("h200-torch", "", "precision is neither fp32 nor a recipe: there is no recipe ''"),
        ("h200-torch", "fp32", "precision is fp32; model.safetensors holds layers in bf16 and fp8"),
        ("h200-torch", "int8", "precision is 'int8'; model.safetensors holds layers in bf16 and"),
        ("h200-torch", "nvfp4", "precision is 'nvfp4'; model.safetensors holds layers in bf16"),
        (
            "rtx",
            "fp32",
            "fp32 computes in fp32; the models' configurations of this profile have bf16",
        ),
        ("cpu", "fp8-rows-all", "fp8-rows-all computes in bf16; the models' configurations of"),
    ],
)
def test_a_recipe_that_the_profile_s_dit_cannot_have(profile, recipe, said):
    with pytest.raises(BuildError, match=f"^profile '{profile}', DIT_PRECISION: {said}"):
        with_dit_precision(load_profile(profile), recipe)
