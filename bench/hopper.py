"""Full-size Qwen-Image with random weights on one CUDA GPU: numerics, times, baselines.

    python -m bench.hopper [--parts dit baselines …] [--out FILE]

Checks every engine against the stock BF16 module with the same weights, then measures it; writes
JSON with the machine, versions, shapes, times by kernel and rooflines, and prints a table. Parts
that FILE has of the same machine and versions stay. Needs 100 GB of GPU memory, and 43 GB of disk
for `requests`.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bench import hopper_engines as full
from bench import hopper_repository, hopper_requests
from bench.common import Stopwatch, check_space, earlier_results, versions
from bench.gpu_timing import PACKAGES, gpu_machine, kernel_times, median_ms
from bench.hopper_engines import (
    TEXT_TOKENS,
    Inputs,
    Models,
    fp8_blocks,
    in_fp8,
    no_fp8,
    stock_step,
)
from bench.roofline import ROOF, Work, dit_work
from build.profile import BuildError
from export import ExportError
from hopper.dit import rows_for
from hopper.text_encoder import TextEncoder
from hopper.vae_decoder import VaeDecoder
from runtimes import EngineError
from serving.server import ServeError

RECIPE = "fp8-rows"  # the profile's, but for its attention
SIGMAS = (0.95, 0.6, 0.2)
# Latent patches down and across; two rows are one guided step.
STEPS = {
    "1024² guided": (2, 64, 64),
    "1024²": (1, 64, 64),
    "512² guided": (2, 32, 32),
    "512² guided, 8 requests": (16, 32, 32),
    "1328×1328 guided": (2, 83, 83),
    "1664×928 guided": (2, 104, 58),
    "1472×1104 guided": (2, 92, 69),
    "1584×1056 guided": (2, 99, 66),
}


def cosine(result: Tensor, expected: Tensor) -> float:
    similarity = functional.cosine_similarity(
        result.double().flatten(), expected.double().flatten(), dim=0
    )
    return round(similarity.item(), 6)


def numerics(models: Models) -> list[dict[str, Any]]:
    """Cosines of single predictions to the stock module's in BF16."""
    result = []
    for sigma in SIGMAS:
        for valid in (None, [TEXT_TOKENS, 9]):
            inputs = models.inputs(2, 64, 64, sigma, valid)
            expected = models.expected(inputs, 64, 64, sigma)
            result.append(
                {
                    "sigma": sigma,
                    "text_tokens": valid or [TEXT_TOKENS] * 2,
                    "cosine": cosine(models.dit(**inputs), expected),
                }
            )
    return result


def measured_step(models: Models, inputs: Inputs, work: Work, repeats: int = 10) -> dict[str, Any]:
    """The first two calls, which plan and record, and the median of the next."""
    result: dict[str, Any] = {}
    for name in ("first_ms", "second_ms"):
        started = time.perf_counter()
        models.dit(**inputs)
        torch.cuda.synchronize()
        result[name] = round((time.perf_counter() - started) * 1e3, 1)
    result["ms"] = median_ms(lambda: models.dit(**inputs), repeats)
    result["roofline_ms"] = round(work.seconds(ROOF) * 1e3, 2)
    result["ratio_to_roofline"] = round(result["ms"] / result["roofline_ms"], 3)
    return result


def steps(models: Models, fp8_attention: bool, bf16_blocks: int) -> dict[str, Any]:
    result = {}
    given = ("fp8", fp8_attention, bf16_blocks)
    for name, (batch, height, width) in STEPS.items():
        inputs = models.inputs(batch, height, width)
        work = dit_work(batch, height * width, TEXT_TOKENS, *given)
        result[name] = {
            "batch": batch,
            "image_tokens": height * width,
            "text_tokens": TEXT_TOKENS,
            **measured_step(models, inputs, work, 10 if height * width <= 4096 else 5),
        }
    name = "1024² guided, texts of 128 and 9 tokens"
    inputs = models.inputs(2, 64, 64, valid=[TEXT_TOKENS, 9])
    work = dit_work(2, 4096, rows_for(TEXT_TOKENS + 9, 2 * TEXT_TOKENS) // 2, *given)
    result[name] = measured_step(models, inputs, work)
    return result


def dit(result: dict[str, Any]) -> Iterator[None]:
    """By the profile's recipe, without and with its FP8 attention."""
    models = Models(quantized=in_fp8(RECIPE))
    yield from both_attentions(result, models, full.edges(RECIPE))


def dit_all_fp8(result: dict[str, Any]) -> Iterator[None]:
    """Every layer of every block in FP8."""
    models = Models()
    yield from both_attentions(result, models, set())
    timesteps = torch.linspace(1, 0.02, 50, device="cuda")[:, None]
    result["modulation_of_50_steps_ms"] = median_ms(lambda: models.modulation(timesteps), 5)


def both_attentions(result: dict[str, Any], models: Models, edges: set[int]) -> Iterator[None]:
    """edges: the blocks that stay in BF16."""
    inputs = models.inputs(2, 64, 64)
    for fp8_attention in (False, True):
        found = result
        if fp8_attention:
            models.use_fp8_attention(edges)
            found = result["fp8_attention"] = {}
        found["numerics"] = numerics(models)
        yield
        found["steps"] = steps(models, fp8_attention, len(edges))
        yield
        found["profile"] = kernel_times(lambda: models.dit(**inputs))


def torch_init(result: dict[str, Any]) -> Iterator[None]:
    """Numerics with weights by torch's own initialization."""
    models = Models(initialized=True)
    result["numerics"] = numerics(models)
    models.use_fp8_attention()
    result["fp8_attention"] = {"numerics": numerics(models)}
    models.quantize(in_fp8(RECIPE))
    models.use_fp8_attention(full.edges(RECIPE))
    result["recipe_and_fp8_attention"] = {"numerics": numerics(models)}
    yield


def baselines(result: dict[str, Any]) -> Iterator[None]:
    """The stock module in BF16: eager, then its blocks compiled; ours in between."""
    models = Models(quantized=in_fp8(RECIPE))
    inputs = models.inputs(2, 64, 64)
    work = dit_work(2, 4096, TEXT_TOKENS, "bf16", False)
    result["roofline_ms"] = round(work.seconds(ROOF) * 1e3, 2)

    def step() -> Tensor:
        return stock_step(models.stock, inputs, [[(1, 64, 64)]] * 2, 0.6)

    def ours() -> float:
        return median_ms(lambda: models.dit(**inputs))

    result["diffusers_eager_ms"] = median_ms(step, 5, 1)
    yield
    result["recipe_ms"] = ours()
    models.use_fp8_attention(full.edges(RECIPE))
    result["recipe_and_fp8_attention_ms"] = ours()
    models.quantize(fp8_blocks)
    result["all_fp8_ms"] = ours()
    models.use_fp8_attention()
    result["all_fp8_and_attention_ms"] = ours()
    yield
    models.stock.compile_repeated_blocks(fullgraph=True)
    started = time.perf_counter()
    step()
    torch.cuda.synchronize()
    result["compilation_s"] = round(time.perf_counter() - started, 1)
    result["diffusers_compiled_blocks_ms"] = median_ms(step, 5, 1)


def cache_dit(result: dict[str, Any]) -> Iterator[None]:
    """The stock module, eager, with cache-dit, which skips steps."""
    from bench import hopper_cache  # needs cache-dit

    models = Models(quantized=no_fp8)
    inputs = models.inputs(2, 64, 64)

    def step(latents: Tensor, sigma: float) -> Tensor:
        given = {**inputs, "hidden_states": latents}
        return stock_step(models.stock, given, [[(1, 64, 64)]] * 2, sigma)

    result |= hopper_cache.measure(models.stock, step, inputs["hidden_states"])
    yield


def text_encoder(result: dict[str, Any]) -> Iterator[None]:
    stock = full.language_model()
    recipe = in_fp8(RECIPE, "text_encoder")
    for name, quantized in (("bf16", no_fp8), (RECIPE, recipe), ("fp8", fp8_blocks)):
        encoder = TextEncoder(full.packed("text_encoder", stock, quantized), full.TEXT)
        for tokens in (128, 200, 1058):
            result[f"{name}, {tokens} tokens"] = prompt(encoder, stock, tokens)
        yield


def prompt(encoder: TextEncoder, stock: Any, tokens: int) -> dict[str, Any]:
    generator = torch.Generator("cuda").manual_seed(tokens)
    vocabulary = full.TEXT_CONFIG.vocab_size
    ids = torch.randint(vocabulary, (1, tokens), device="cuda", generator=generator)
    expected = stock(input_ids=ids).last_hidden_state[:, full.TEXT["dropped_tokens"] :]
    started = time.perf_counter()
    found = encoder(ids)
    torch.cuda.synchronize()
    first = time.perf_counter() - started
    return {
        "first_ms": round(first * 1e3, 2),
        "ms": median_ms(lambda: encoder(ids)),
        "stock_ms": median_ms(lambda: stock(input_ids=ids), 5),
        "cosine": cosine(found, expected),
    }


def vae_decoder(result: dict[str, Any]) -> Iterator[None]:
    stock = full.vae()
    decoder = VaeDecoder(full.packed("vae_decoder", stock, no_fp8), full.VAE_CONFIG)
    for name, (height, width) in {"1024²": (128, 128), "1664×928": (116, 208)}.items():
        latents = torch.randn(1, 16, height, width, device="cuda")
        result[name] = picture(decoder, stock, latents)
    latents = torch.randn(1, 16, 128, 128, device="cuda")
    result["profile"] = kernel_times(lambda: decoder(latents))
    yield


def picture(decoder: VaeDecoder, stock: Any, latents: Tensor) -> dict[str, Any]:
    frame = latents.bfloat16()[:, :, None]
    wanted = stock.decode(frame).sample[:, :, 0].float()
    wanted = ((wanted * 0.5 + 0.5).clamp(0, 1) * 255).permute(0, 2, 3, 1)
    started = time.perf_counter()
    pixels = decoder(latents)
    torch.cuda.synchronize()
    first = time.perf_counter() - started
    return {
        "first_ms": round(first * 1e3, 1),
        "ms": median_ms(lambda: decoder(latents)),
        "stock_ms": median_ms(lambda: stock.decode(frame).sample, 5),
        "mean_difference_of_255": round((pixels.float() - wanted).abs().mean().item(), 3),
        "standard_deviation_of_255": round(wanted.std().item(), 1),
    }


def requests(result: dict[str, Any]) -> Iterator[None]:
    """Through Triton, whole: a repository of full size, served; then with everything in FP8."""
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder) / "repository"
        watch = Stopwatch()
        hopper_repository.make(repository)
        result["repository_made_in_s"] = round(watch.seconds(), 1)
        for found in hopper_requests.measure(repository):
            result |= found
            yield
        hopper_repository.change_dit(repository, "fp8-rows-all")
        result["everything in FP8"] = hopper_requests.measure_guided(repository)
    yield


PARTS = {
    part.__name__: part
    for part in (
        dit,
        dit_all_fp8,
        torch_init,
        baselines,
        cache_dit,
        text_encoder,
        vae_decoder,
        requests,
    )
}


def print_table(parts: dict[str, Any], prefix: str = "") -> None:
    for name, value in parts.items():
        if isinstance(value, dict):
            print_table(value, f"{prefix}{name}: ")
        elif isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
            for entry in value:
                print(f"{prefix}{name}: {', '.join(f'{k} {v}' for k, v in entry.items())}")
        else:
            print(f"{prefix}{name}: {value}")


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, default=Path("bench/results/hopper.json"))
    arguments = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "hopper", "weights": "random, by bench.hopper_engines"}
    result |= {"machine": gpu_machine(), "versions": versions(*PACKAGES), "parts": {}}
    if "requests" in arguments.parts:
        check_space(parser, None, hopper_repository.DISK_GB)
    before = earlier_results(arguments.out)
    if all(before.get(name) == result[name] for name in ("machine", "versions")):
        result["parts"] = before.get("parts", {})
    try:
        measure(arguments.parts, result, arguments.out)
    except (BuildError, EngineError, ExportError, ServeError) as error:
        parser.exit(1, f"error: {error}\n")


def measure(parts: list[str], result: dict[str, Any], out: Path) -> None:
    """Adds the parts to the result and writes it after each."""
    for name in parts:
        started = time.perf_counter()
        values: dict[str, Any] = {"date": datetime.now(timezone.utc).isoformat(timespec="seconds")}
        result["parts"][name] = values
        for _ in PARTS[name](values):  # what is known is written, should a later one fail
            out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        values["benchmark_s"] = round(time.perf_counter() - started, 1)
        values["peak_memory_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
        gc.collect()  # engines refer to themselves
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print_table({name: values})


if __name__ == "__main__":
    main()
