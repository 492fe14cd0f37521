"""Pictures and noise predictions of a running server."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import ml_dtypes
import numpy as np
import tritonclient.grpc as grpcclient
from PIL import Image
from tritonclient.utils import InferenceServerException

from quality.gate import Prompt, QualityError
from quality.source import Picture
from qwen_image_client import Client, QwenImageError

_IN_FLIGHT = 8  # as many as `denoise` runs at once by default
TIMEOUT = 1800.0  # seconds; a server that hangs answers never
_NUMPY: dict[str, Any] = {
    "INT32": np.int32,
    "INT64": np.int64,
    "FP32": np.float32,
    "BF16": ml_dtypes.bfloat16,
    "BOOL": np.bool_,
    "BYTES": np.object_,
}
_SCALARS = ("num_inference_steps", "true_cfg_scale", "height", "width", "seed")


class Served:
    """The service at `url` (gRPC, host:port). A context manager, for its connections."""

    def __init__(self, url: str) -> None:
        self.url = url
        try:
            self._client = Client(url)
            self._triton = grpcclient.InferenceServerClient(url.removeprefix("grpc://"))
        except (QwenImageError, InferenceServerException) as error:
            raise QualityError(str(error)) from None
        self._metadata: dict[str, Any] = {}

    def __enter__(self) -> Served:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._client.close()
        self._triton.close()

    def describe(self) -> dict[str, Any]:
        return {
            "source": "server",
            "checkpoint": self._metadata.get("checkpoint"),
            "versions": self._metadata.get("versions", {}),
        }

    def draw(self, prompts: Sequence[Prompt]) -> Iterator[Picture]:
        """As many at a time as the server runs at once, in the order of the prompts."""
        waiting: deque[tuple[int, Any]] = deque()
        for number, prompt in enumerate(prompts):
            waiting.append((number, self._submit(prompt)))
            if len(waiting) == _IN_FLIGHT:
                yield self._picture(prompts, *waiting.popleft())
        while waiting:
            yield self._picture(prompts, *waiting.popleft())

    def _submit(self, prompt: Prompt) -> Any:
        try:
            return self._client.submit(**prompt.fields, timeout=TIMEOUT)
        except QwenImageError as error:
            raise QualityError(f"no picture for {prompt.text!r}: {error}") from None

    def _picture(self, prompts: Sequence[Prompt], number: int, handle: Any) -> Picture:
        try:
            generation = handle.result()
            image: Image.Image = generation.images[0]
        except QwenImageError as error:
            raise QualityError(f"no picture for {prompts[number].text!r}: {error}") from None
        self._metadata = generation.metadata
        return Picture(number, np.asarray(image.convert("RGB")))

    def latents(self, prompt: Prompt) -> np.ndarray:
        judged = self._tokenize(prompt)
        inputs = {name: judged[name] for name in ("input_ids", "negative_input_ids", *_SCALARS)}
        inputs["num_images_per_prompt"] = judged["num_images_per_prompt"]
        return self.infer("denoise", inputs, ["latents"])["latents"][0]

    def predict_noise(self, prompt: Prompt, latents: np.ndarray, level: float) -> np.ndarray:
        _, height, width = latents.shape
        ids = self._tokenize(prompt)["input_ids"][None]
        text = self.infer("text_encoder", {"input_ids": ids}, ["hidden_states"])["hidden_states"]
        modulation = self.infer(
            "modulation", {"timestep": [[level]]}, ["block_modulation", "final_modulation"]
        )
        prediction = self.infer(
            "dit",
            {
                "hidden_states": pack(latents[None]),
                "encoder_hidden_states": text,
                "text_mask": np.ones(text.shape[:2], np.bool_),
                "position_ids": position_ids(text.shape[1], height // 2, width // 2)[None],
                **modulation,
            },
            ["noise_pred"],
        )["noise_pred"]
        return unpack(prediction, height, width)[0]

    def _tokenize(self, prompt: Prompt) -> dict[str, np.ndarray]:
        names = ["input_ids", "negative_input_ids", *_SCALARS, "num_images_per_prompt"]
        inputs: dict[str, Any] = {
            name: [value.encode()] if isinstance(value, str) else [value]
            for name, value in prompt.fields.items()
        }
        return self.infer("tokenize", inputs, names)

    def infer(
        self, model: str, inputs: dict[str, Any], outputs: Sequence[str]
    ) -> dict[str, np.ndarray]:
        """Calls a model with arrays, converted to the types that it takes; what it puts out in BF16
        is given in FP32. Raises QualityError."""
        try:
            metadata = self._triton.get_model_metadata(model, as_json=True)
            types = {tensor["name"]: tensor["datatype"] for tensor in metadata["inputs"]}
            tensors = []
            for name, value in inputs.items():
                array = np.ascontiguousarray(value, _NUMPY[types[name]])
                tensor = grpcclient.InferInput(name, list(array.shape), types[name])
                tensor.set_data_from_numpy(array)
                tensors.append(tensor)
            requested = [grpcclient.InferRequestedOutput(name) for name in outputs]
            result = self._triton.infer(model, tensors, outputs=requested, client_timeout=TIMEOUT)
        except InferenceServerException as error:
            raise QualityError(f"{self.url}: {model!r}: {error.message()}") from None
        arrays = {name: result.as_numpy(name) for name in outputs}
        return {
            name: array.astype(np.float32) if array.dtype == ml_dtypes.bfloat16 else array
            for name, array in arrays.items()
        }


def pack(latents: np.ndarray) -> np.ndarray:
    """[n, c, h, w] → tokens [n, h/2 · w/2, c · 4], a token for each 2×2 patch."""
    n, c, h, w = latents.shape
    patches = latents.reshape(n, c, h // 2, 2, w // 2, 2).transpose(0, 2, 4, 1, 3, 5)
    return patches.reshape(n, (h // 2) * (w // 2), c * 4)


def unpack(tokens: np.ndarray, h: int, w: int) -> np.ndarray:
    """[n, h/2 · w/2, c · 4] → [n, c, h, w]."""
    n, _, width = tokens.shape
    patches = tokens.reshape(n, h // 2, w // 2, width // 4, 2, 2).transpose(0, 3, 1, 4, 2, 5)
    return patches.reshape(n, width // 4, h, w)


def position_ids(text_tokens: int, rows: int, columns: int) -> np.ndarray:
    """(frame, height, width) of every token, INT32 [text_tokens + rows · columns, 3]: the text on
    the diagonal behind the image, whose coordinates are centred (diffusers, `QwenEmbedRope`)."""
    text = max(rows // 2, columns // 2) + np.arange(text_tokens)
    y, x = np.mgrid[-(rows - rows // 2) : rows // 2, -(columns - columns // 2) : columns // 2]
    image = np.stack([np.zeros_like(y), y, x], -1).reshape(-1, 3)
    return np.concatenate([np.stack([text] * 3, -1), image]).astype(np.int32)
