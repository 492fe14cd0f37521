"""A fake of the server behind the client's wire: what it does is written in the prompt
(or in the negative prompt, where there is one).

    sleep 2.5            wait, then answer; ends early when cancelled or at the deadline
    stubborn 2.5         the same, blind to the deadline
    late 0.3             be unknown to `cancel` for that long, then wait to be cancelled
    error CODE sentence  answer with that error
    refuse 2 sentence    answer the first two attempts of this request id with UNAVAILABLE
    pixels 4096          answer with an incompressible image of that side
    garbage              answer with bytes that are no image
    anything else        answer with a small image

Every request, answer and cancellation is appended to the file `journal` beside the model
repository, one JSON object a line.
"""

import io
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from PIL import Image

INPUTS = (
    "prompt",
    "negative_prompt",
    "num_inference_steps",
    "true_cfg_scale",
    "height",
    "width",
    "seed",
    "num_images_per_prompt",
    "output_format",
    "response_format",
)
NEVER = 60.0  # seconds


class Refusal(Exception):
    def __init__(self, code: Any, sentence: str) -> None:
        self.code, self.sentence = code, sentence


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self.family = pb_utils.MetricFamily(
            name="qwen_image_requests_total",
            description="Requests",
            kind=pb_utils.MetricFamily.COUNTER,
        )
        self.requests = self.family.Metric(labels={"outcome": "ok"})
        self.journal = Path(args["model_repository"]).resolve().parents[1] / "journal"
        self.lock = threading.Lock()
        self.in_flight: dict[str, threading.Event] = {}
        self.attempts: dict[str, int] = {}

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            parameters = json.loads(request.parameters())
            sender = request.get_response_sender()
            self.requests.increment(1)
            if "cancel" in parameters:
                self.cancel(parameters["cancel"], sender)
                continue
            tensors = {}
            for name in INPUTS:
                tensor = pb_utils.get_input_tensor_by_name(request, name)
                if tensor is not None:
                    array = tensor.as_numpy()
                    value = array.reshape(-1)[0]
                    value = value.decode() if isinstance(value, bytes) else value.item()
                    tensors[name] = [str(array.dtype), list(array.shape), value]
            job = {
                "event": "request",
                "id": request.request_id(),
                "timeout_us": request.timeout(),
                "parameters": parameters,
                "tensors": tensors,
            }
            if instruction(job)[0] != "late":
                self.in_flight[job["id"]] = threading.Event()
            self.write(job)
            threading.Thread(target=self.work, args=(job, sender), daemon=True).start()

    def cancel(self, request_id: str, sender: Any) -> None:
        event = self.in_flight.get(request_id)
        answer = {"cancelled": int(event is not None)}
        self.write({"event": "cancel", "id": request_id, **answer})
        send(sender, pb_utils.InferenceResponse([text_tensor("record", answer)]))
        if event is not None:
            event.set()

    def write(self, entry: dict[str, Any]) -> None:
        with self.lock, self.journal.open("a") as journal:
            journal.write(json.dumps(entry) + "\n")

    def work(self, job: dict[str, Any], sender: Any) -> None:
        try:
            response = self.answer(job)
        except Refusal as refusal:
            error = pb_utils.TritonError(refusal.sentence, refusal.code)
            response = pb_utils.InferenceResponse(error=error)
        self.in_flight.pop(job["id"], None)
        self.write({"event": "answer", "id": job["id"]})
        send(sender, response)

    def answer(self, job: dict[str, Any]) -> Any:
        fields = {name: tensor[2] for name, tensor in job["tensors"].items()}
        verb, rest = instruction(job)
        if verb == "error":
            code, _, sentence = rest.partition(" ")
            raise Refusal(getattr(pb_utils.TritonError, code), sentence)
        if verb == "refuse":
            times, _, sentence = rest.partition(" ")
            attempt = self.attempts[job["id"]] = self.attempts.get(job["id"], 0) + 1
            if attempt <= int(times):
                raise Refusal(pb_utils.TritonError.UNAVAILABLE, sentence)
        if verb == "late":
            threading.Event().wait(float(rest))
            self.wait(job, NEVER, NEVER)
        if verb in ("sleep", "stubborn"):
            deadline = job["timeout_us"] / 1e6 if verb == "sleep" else 0
            self.wait(job, float(rest.split()[0]), deadline or NEVER)
        count = fields.get("num_images_per_prompt", 1)
        first_seed = fields.get("seed", 7)
        seeds = np.arange(first_seed, first_seed + count, dtype=np.int64)
        side = int(rest) if verb == "pixels" else 16
        images = [picture(side, fields.get("output_format", "png"), seed) for seed in seeds]
        if verb == "garbage":
            images = [b"no image"] * count
        metadata = {
            "request_id": job["id"],
            "height": side,
            "width": side,
            "seeds": seeds.tolist(),
            "stages_ms": {
                "queue": 0.1,
                "encode": 0.2,
                "modulation": 0.1,
                "denoise": 0.4,
                "decode": 0.1,
                "pack": 0.1,
            },
        }
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("generated_image", np.array(images, dtype=object)),
                pb_utils.Tensor("seeds", seeds),
                text_tensor("record", metadata),
            ]
        )

    def wait(self, job: dict[str, Any], seconds: float, deadline: float) -> None:
        cancelled = self.in_flight.setdefault(job["id"], threading.Event())
        if cancelled.wait(min(seconds, deadline)):
            raise Refusal(pb_utils.TritonError.CANCELLED, "cancelled by a client")
        if deadline < seconds:
            sentence = f"deadline of {job['timeout_us'] // 1000} ms exceeded"
            raise Refusal(pb_utils.TritonError.CANCELLED, sentence)


def instruction(job: dict[str, Any]) -> tuple[str, str]:
    """The verb and the rest of what the prompt says."""
    tensors = job["tensors"]
    verb, _, rest = tensors.get("negative_prompt", tensors["prompt"])[2].partition(" ")
    return verb, rest


def picture(side: int, output_format: str, seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, output_format, compress_level=0)
    return stream.getvalue()


def text_tensor(name: str, content: dict[str, Any]) -> Any:
    return pb_utils.Tensor(name, np.array([json.dumps(content)], dtype=object))


def send(sender: Any, response: Any) -> None:
    sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
