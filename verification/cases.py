"""What each engine is given and what the torch module makes of it, on real prompts.

The inputs of an engine are what torch's own modules put out before it, so that its error is its
own. Cases are kept in one safetensors file: `<engine>/<case>/<in|out>/<tensor>`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from export.recipe import ENGINES
from export.stored import first_line
from quality.gate import Gate, Prompt, QualityError, load_gate
from quality.run import RESULT, load_run
from quality.served import pack, position_ids

if TYPE_CHECKING:
    from quality.diffused import Diffused

_PROMPTS = 4  # of the gate's; each with every noise level


class Case(NamedTuple):
    """Inputs and expected outputs of one call, arrays by the engine's tensor names, rows first.

    What `text_mask` hides of the inputs must not change the outputs.
    """

    engine: str
    name: str
    inputs: dict[str, np.ndarray]
    outputs: dict[str, np.ndarray]


def are_of(path: Path, reference: Path) -> bool:
    """Whether the file is there and whole, and its cases are of that run."""
    if not path.is_file():
        return False
    try:
        with safe_open(path, "numpy") as file:
            return (file.metadata() or {}).get("reference") == _digest(reference)
    except SafetensorError:
        return False


def _digest(reference: Path) -> str:
    return hashlib.sha256((reference / RESULT).read_bytes()).hexdigest()


def read_cases(path: Path) -> Iterator[Case]:
    with safe_open(path, "numpy") as file:
        cases: dict[tuple[str, str], dict[str, dict[str, np.ndarray]]] = {}
        for key in file.keys():  # noqa: SIM118 – it is no mapping
            engine, name, direction, tensor = key.split("/")
            case = cases.setdefault((engine, name), {"in": {}, "out": {}})
            case[direction][tensor] = file.get_tensor(key)
    for (engine, name), tensors in sorted(cases.items(), key=lambda x: ENGINES.index(x[0][0])):
        yield Case(engine, name, tensors["in"], tensors["out"])


def make_cases(
    checkpoint: Path, gate: Gate, noise: dict[str, np.ndarray], dtype: str
) -> list[Case]:
    """The cases of a gate's first prompts.

    Args:
        noise: of a run of the gate (`quality.run.Run.noise`).
        dtype: what torch computes in, `float32` or `bfloat16`.

    Raises:
        QualityError: the checkpoint cannot be loaded.
    """
    from quality.diffused import Diffused  # with diffusers, which takes seconds

    modules = _Modules(Diffused(checkpoint, dtype))
    # The transformer takes timesteps in its own type.
    levels = torch.from_numpy(noise["levels"]).to(getattr(torch, dtype)).tolist()
    numbers = sorted(int(key.split("_")[1]) for key in noise if key.startswith("latents_"))
    prompts = {number: gate.prompts[number] for number in numbers[:_PROMPTS]}
    cases, states = [], {}
    for number, prompt in prompts.items():
        ids, states[number] = modules.encode(prompt)
        cases.append(
            Case(
                "text_encoder",
                f"prompt-{number}",
                {"input_ids": ids},
                {"hidden_states": states[number]},
            )
        )
    timesteps = np.array(levels, np.float32)[:, None]
    modulations = modules.modulate(timesteps)
    cases.append(Case("modulation", "levels", {"timestep": timesteps}, modulations))
    for row, level in enumerate(levels):
        rows = []
        for number in prompts:
            latents = noise[f"latents_{number}"][row]
            modulation = {name: value[row : row + 1] for name, value in modulations.items()}
            rows.append(modules.predict(latents, states[number], level, modulation))
            cases.append(Case("dit", f"prompt-{number}-noise-{level:g}", *rows[-1]))
        alike = [
            row
            for row in rows
            if row[0]["hidden_states"].shape == rows[0][0]["hidden_states"].shape
        ]
        if len(alike) > 1:
            cases.append(Case("dit", f"{len(alike)}-padded-rows-noise-{level:g}", *_padded(alike)))
    for number in prompts:
        latents = noise[f"latents_{number}"][-1]  # the least noisy
        cases.append(Case("vae_decoder", f"prompt-{number}", *modules.decode(latents)))
    return cases


def _padded(rows: list[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]) -> tuple[Any, Any]:
    """Several `dit` calls as rows of one, texts padded to the longest with what must not matter."""
    longest = max(inputs["text_mask"].shape[1] for inputs, _ in rows)
    padded = []
    for inputs, _ in rows:
        missing = longest - inputs["text_mask"].shape[1]
        states = inputs["encoder_hidden_states"]
        text, image = np.split(inputs["position_ids"], [states.shape[1]], axis=1)
        more = text[:, -1:] + np.arange(1, missing + 1, dtype=np.int32)[None, :, None]
        padded.append(
            {
                **inputs,
                "encoder_hidden_states": np.pad(
                    states, ((0, 0), (0, missing), (0, 0)), constant_values=states.max()
                ),
                "text_mask": np.pad(inputs["text_mask"], ((0, 0), (0, missing))),
                "position_ids": np.concatenate([text, more, image], axis=1),
            }
        )
    joined = {name: np.concatenate([row[name] for row in padded]) for name in padded[0]}
    return joined, {"noise_pred": np.concatenate([outputs["noise_pred"] for _, outputs in rows])}


class _Modules:
    """The modules of diffusers' pipeline, called with arrays."""

    def __init__(self, diffused: Diffused) -> None:
        self._diffused = diffused
        self._pipeline = diffused.pipeline
        self._device = self._pipeline._execution_device
        self._dtype = self._pipeline.transformer.dtype

    @torch.no_grad()
    def encode(self, prompt: Prompt) -> tuple[np.ndarray, np.ndarray]:
        """→ INT64 [1, S], FP32 [1, T, text width]."""
        pipeline = self._pipeline
        template = pipeline.prompt_template_encode.format(prompt.text)
        ids = pipeline.tokenizer([template], return_tensors="np").input_ids
        states, _ = pipeline.encode_prompt(
            prompt.text, device=self._device, max_sequence_length=1024
        )
        return ids.astype(np.int64), _array(states)

    @torch.no_grad()
    def modulate(self, timesteps: np.ndarray) -> dict[str, np.ndarray]:
        from export.reference import modulate  # the same

        values = modulate(self._pipeline.transformer, torch.from_numpy(timesteps).to(self._device))
        return {name: _array(value) for name, value in values.items()}

    @torch.no_grad()
    def predict(
        self, latents: np.ndarray, text: np.ndarray, level: float, modulation: dict[str, np.ndarray]
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """One call of the transformer; latents: FP32 [16, h, w]."""
        _, h, w = latents.shape
        tokens = _array(torch.from_numpy(pack(latents[None])).to(self._dtype))
        mask = np.ones(text.shape[:2], np.bool_)
        prediction = self._diffused.predict_tokens(
            self._tensor(tokens),
            self._tensor(text),
            torch.from_numpy(mask).to(self._device),
            level,
            (h // 2, w // 2),
        )
        inputs = {
            "hidden_states": tokens,
            "encoder_hidden_states": text,
            "text_mask": mask,
            "position_ids": position_ids(text.shape[1], h // 2, w // 2)[None],
            **modulation,
        }
        return inputs, {"noise_pred": _array(prediction)}

    @torch.no_grad()
    def decode(self, latents: np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """latents: FP32 [16, h, w] as the transformer has them."""
        vae = self._pipeline.vae
        mean, std = (
            np.array(values, np.float32)[None, :, None, None]
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        scaled = latents[None] * std + mean
        image = vae.decode(self._tensor(scaled)[:, :, None], return_dict=False)[0][:, :, 0]
        pixels = ((image.float() * 0.5 + 0.5).clamp(0, 1) * 255).round().permute(0, 2, 3, 1)
        return {"latents": scaled}, {"pixels": pixels.to(torch.uint8).cpu().numpy()}

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, self._dtype)


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.float().cpu().numpy()


def write_cases(
    checkpoint: Path, gate_folder: Path, reference: Path, dtype: str, out: Path
) -> None:
    """Makes the cases of a gate and writes them; reference: a run of it, with noise.

    Raises QualityError, OSError.
    """
    gate = load_gate(gate_folder)
    noise = load_run(reference).noise()
    assert noise is not None  # the gate has noise levels
    cases = make_cases(checkpoint, gate, noise, dtype)
    tensors = {
        f"{case.engine}/{case.name}/{direction}/{name}": np.ascontiguousarray(array)
        for case in cases
        for direction, arrays in (("in", case.inputs), ("out", case.outputs))
        for name, array in arrays.items()
    }
    unfinished = out.with_name(f".{out.name}.partial")
    try:
        save_file(tensors, unfinished, {"reference": _digest(reference)})
        unfinished.replace(out)
    except SafetensorError as error:  # its word for a full disk, among others
        raise QualityError(f"{out} cannot be written: {first_line(error)}") from None
    finally:
        unfinished.unlink(missing_ok=True)
