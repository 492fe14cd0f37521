"""Triton backend `engine`: runs a model's engine in whatever runtime its artifact asks for.

A model that names `backend: "engine"` in its configuration needs no code of its own. The artifact
beside it, `<version>/model.<kind>`, picks the runtime: `runtimes/<kind>.py`, a module with a class
`Runtime` (see `runtimes/__init__.py`). A new runtime is a new file there.

Requests arrive as Triton's dynamic batcher merged them, all of equal shapes; they run as one batch.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from runtimes import EngineError, TensorSpec, check_signature


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        parameters = {
            name: value["string_value"] for name, value in config.get("parameters", {}).items()
        }
        folder = Path(args["model_repository"]) / args["model_version"]
        declared = {
            direction: [
                TensorSpec(tensor["name"], pb_utils.triton_string_to_numpy(tensor["data_type"]))
                for tensor in config[direction]
            ]
            for direction in ("input", "output")
        }
        try:
            artifact = _find_artifact(folder)
            runtime = importlib.import_module(f"runtimes.{artifact.suffix[1:]}").Runtime
            self._runtime = runtime(artifact, parameters)
            check_signature("inputs", declared["input"], self._runtime.inputs)
            check_signature("outputs", declared["output"], self._runtime.outputs)
        except EngineError as error:
            raise pb_utils.TritonModelException(f"{config['name']}: {error}") from None
        self._input_names = [spec.name for spec in declared["input"]]
        self._output_names = [spec.name for spec in declared["output"]]

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

    def _run(self, inputs: list[dict[str, np.ndarray]]) -> list[Any]:
        """Runs the requests as one batch; every response is an object of its own."""
        batch = {
            name: np.concatenate([arrays[name] for arrays in inputs])
            if len(inputs) > 1
            else inputs[0][name]
            for name in self._input_names
        }
        outputs = self._runtime.run(batch)
        rows = [len(arrays[self._input_names[0]]) for arrays in inputs]
        ends = np.cumsum(rows)
        return [
            pb_utils.InferenceResponse(
                [
                    pb_utils.Tensor(name, outputs[name][end - count : end])
                    for name in self._output_names
                ]
            )
            for count, end in zip(rows, ends, strict=True)
        ]

    def _read(self, request: Any) -> dict[str, np.ndarray]:
        return {
            name: pb_utils.get_input_tensor_by_name(request, name).as_numpy()
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
