"""Trains the small checkpoint on one GPU, in as many runs as it takes.

    python -m training STATE --out CHECKPOINT      # all of it, and the export
    python -m training STATE --minutes 9           # some of it; the same again goes on

STATE is a folder: a new one starts a training, one that holds a state goes on with it.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quality.sheet import contact_sheet
from training import flow, store, vae
from training.export import export
from training.layout import DROPPED_TOKENS, TEMPLATE_PREFIX, TEMPLATE_SUFFIX, scheduler
from training.models import Sizes, parameter_table, use_image_convolutions
from training.pool import Pool
from training.progress import Progress
from training.sample import sample
from training.scenes import Renderer
from training.settings import Settings


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m training",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("state", type=Path, metavar="STATE")
    parser.add_argument("--stage", choices=("all", "vae", "dit", "export"), default="all")
    parser.add_argument("--minutes", type=float, default=1e6, help="training stops after these")
    parser.add_argument("--out", type=Path, help="export to this new folder")
    parser.add_argument("--samples", type=int, default=192, help="pictures made at the end")
    for kind in (Settings, Sizes):
        for field in fields(kind):
            flag = "--" + field.name.replace("_", "-")
            if field.type == "bool":
                action = argparse.BooleanOptionalAction
                parser.add_argument(flag, action=action, default=field.default)
            elif field.name != "rope_axes":
                convert: Any = {"int": int, "float": float}[str(field.type)]
                parser.add_argument(flag, type=convert, default=field.default)
    parser.add_argument("--rope-axes", type=int, nargs=3, default=Sizes.rope_axes)
    return parser.parse_args(arguments)


def show_reconstructions(models: Any, pool: Pool, path: Path) -> None:
    """Six pictures of each size above what the VAE makes of them."""
    rows: list[np.ndarray] = []
    for bucket in pool.buckets.values():
        pictures = bucket.items[:6]
        mean, _ = vae.encode(models.vae, vae.to_signed(pictures))
        output = models.vae.decoder(models.vae.post_quant_conv(mean))[:, :, 0].clamp(-1, 1)
        output = ((output + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1)
        rows += [*pictures.cpu().numpy(), *output.cpu().numpy()]
    contact_sheet(rows, columns=6).save(path)


def as_stored(models: Any, average: flow.Average) -> None:
    """Puts the averages into the models and rounds everything as the export does."""
    average.apply()
    for _, model in models.items():
        model.eval()
        for parameter in model.parameters():
            parameter.data.copy_(parameter.data.bfloat16())


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    values = vars(options)
    settings = Settings(**{field.name: values[field.name] for field in fields(Settings)})
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        settings = replace(settings, compile=False)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = True
    if settings.compile:
        # What cannot be compiled runs as it is.
        torch._dynamo.config.suppress_errors = True

    options.state.mkdir(parents=True, exist_ok=True)
    progress = Progress(options.state, options.minutes)
    run = progress.state["runs"]
    models, tokenizer = store.start(progress, Sizes.of(values), settings.seed)
    progress.state["settings"] = asdict(settings)
    print(parameter_table(models), f"\n{len(tokenizer)} tokens; run {run} on {device}", flush=True)
    torch.manual_seed(settings.seed + 1000 * run)
    for _, model in models.items():
        model.to(device)
    average = flow.Average(flow.trained(models), settings.ema)
    store.load_average(options.state, average)
    # For as long as this process lives; the weights stay those of the real class.
    use_image_convolutions(models.vae)

    if options.stage != "export":
        with Renderer(
            tokenizer.backend_tokenizer.to_str(),
            (TEMPLATE_PREFIX, TEMPLATE_SUFFIX),
            DROPPED_TOKENS,
            seed=(settings.seed, run),
            workers=settings.workers or None,
        ) as renderer:
            train(options.stage, models, tokenizer, average, renderer, progress, settings, device)
        progress.save()

    done = progress.steps("dit") >= settings.dit_steps
    if progress.steps("dit") and options.samples:
        as_stored(models, average)
        torch.compiler.set_stance("force_eager")
        prompts, pictures, lines = sample(models, tokenizer, options.samples, seed=run)
        contact_sheet(pictures[:96]).save(options.state / "sheet.png")
        print("\n".join([*prompts[:6], *lines]), flush=True)
        progress.state["scores"] = lines
        progress.save()
    if options.out and (done or options.stage == "export"):
        trained, _, _ = store.load_trained(options.state)
        size = export(trained, progress, options.out)
        print(f"{options.out}: {size:,} bytes of safetensors")


def train(
    stage: str,
    models: Any,
    tokenizer: Any,
    average: flow.Average,
    renderer: Renderer,
    progress: Progress,
    settings: Settings,
    device: torch.device,
) -> None:
    """The stages that are due, each saved when it ends or the time is up."""
    seed = (settings.seed, progress.state["runs"])
    vae_done = progress.steps("vae") >= settings.vae_steps
    pool = None
    if stage in ("all", "vae") and not vae_done:
        pool = Pool(renderer, settings.scenes // 2, device, seed=(*seed, 0))
        pool.fill(settings.first_scenes)
        print(f"{pool.count} scenes", flush=True)
        interrupted = None
        try:
            vae_done = vae.train(models.vae, pool, progress, settings)
        except KeyboardInterrupt as error:
            interrupted = error
        models.vae.eval()
        vae.measure_latents(models.vae, pool)
        progress.state["latents"] = {
            name: list(models.vae.config[name]) for name in ("latents_mean", "latents_std")
        }
        with torch.no_grad():
            show_reconstructions(models, pool, progress.folder / "vae.png")
        store.save_vae(progress, models.vae)
        progress.stage_done()
        progress.save()
        if interrupted:
            raise interrupted
    if stage in ("all", "dit") and (vae_done or stage == "dit"):
        models.vae.eval()

        def keep(pictures: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                return vae.latents_of(models.vae, pictures)

        if pool:
            pool.convert(keep)
        else:
            pool = Pool(
                renderer, settings.scenes // 2, device, keep=keep, seed=(*seed, 1), lump=1024
            )
            pool.fill(settings.first_scenes)
        print(f"{pool.count} scenes", flush=True)
        interrupted = None
        try:
            flow.train(models, average, tokenizer, scheduler().config, pool, progress, settings)
        except KeyboardInterrupt as error:
            interrupted = error
        store.save_flow(progress, average)
        progress.stage_done()
        progress.save()
        if interrupted:
            raise interrupted
