"""Triton backend `engine`: runs a model's engine in whatever runtime its artifact asks for.

A model that names `backend: "engine"` in its configuration needs no code of its own. The artifact
beside it, `<version>/model.<kind>`, picks the runtime: `runtimes/<kind>.py`, a module with a class
`Runtime` (see `runtimes/__init__.py`). A new runtime is a new file there.

Requests arrive as Triton's dynamic batcher merged them, all of equal shapes; they run as one batch.
"""

from __future__ import annotations

import importlib
import itertools
import json
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from runtimes import EngineError, TensorSpec, check_signature
from tensors import DeviceTensors, HostArrays


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        parameters = {
            name: value["string_value"] for name, value in config.get("parameters", {}).items()
        }
        folder = Path(args["model_repository"]) / args["model_version"]
        declared = {
            direction: [
                TensorSpec(tensor["name"], tensor["data_type"].removeprefix("TYPE_"))
                for tensor in config[direction]
            ]
            for direction in ("input", "output")
        }
        on_gpu = args["model_instance_kind"] == "GPU"
        gpu = int(args["model_instance_device_id"]) if on_gpu else 0
        try:
            artifact = _find_artifact(folder)
            runtime = importlib.import_module(f"runtimes.{artifact.suffix[1:]}").Runtime
            self._runtime = runtime(artifact, parameters, gpu)
            check_signature("inputs", declared["input"], self._runtime.inputs)
            check_signature("outputs", declared["output"], self._runtime.outputs)
        except EngineError as error:
            raise pb_utils.TritonModelException(f"{config['name']}: {error}") from None
        self._input_names = [spec.name for spec in declared["input"]]
        self._output_names = [spec.name for spec in declared["output"]]
        device = self._runtime.device
        self._tensors = HostArrays() if device is None else DeviceTensors(device)

    def execute(self, requests: list[Any]) -> list[Any]:
        inputs = [self._read(request) for request in requests]
        try:
            return self._run(inputs)
        except EngineError as error:
            if len(inputs) == 1:
                return [pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error)))]
        # One request's values may have failed the batch: let it fail alone.
        return [response for request in requests for response in self.execute([request])]

    def finalize(self) -> None:
        self._runtime.close()

    def _run(self, inputs: list[dict[str, Any]]) -> list[Any]:
        """Runs the requests as one batch; every response is an object of its own."""
        batch = {
            name: self._tensors.join([tensors[name] for tensors in inputs])
            for name in self._input_names
        }
        outputs = self._runtime.run(batch)
        ends = list(itertools.accumulate(len(tensors[self._input_names[0]]) for tensors in inputs))
        return [
            pb_utils.InferenceResponse(
                [
                    self._tensors.to_triton(name, outputs[name][start:end])
                    for name in self._output_names
                ]
            )
            for start, end in itertools.pairwise([0, *ends])
        ]

    def _read(self, request: Any) -> dict[str, Any]:
        return {
            name: self._tensors.from_triton(pb_utils.get_input_tensor_by_name(request, name))
            for name in self._input_names
        }


def _find_artifact(folder: Path) -> Path:
    """Returns the engine file in `folder` that a runtime here can load."""
    kinds = sorted(path.stem for path in (Path(__file__).parent / "runtimes").glob("[a-z]*.py"))
    found = [folder / f"model.{kind}" for kind in kinds if (folder / f"model.{kind}").is_file()]
    if len(found) != 1:
        raise EngineError(
            f"{folder} must hold exactly one of {', '.join(f'model.{kind}' for kind in kinds)}, "
            f"not {[path.name for path in found] or 'none'}; run 'make export'"
        )
    return found[0]
