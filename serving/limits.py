"""Limits in the models' configurations that must fit together."""

from __future__ import annotations

from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from serving.errors import ServeError


def check_limits(model_repository: Path, profile: str) -> None:
    """Compares what a request may ask for with the batches that the engines take.

    Models that are not there are passed over. Raises ServeError: one sentence that names both.
    """
    configs = {
        model: _config(model_repository / model, profile)
        for model in ("tokenize", "denoise", "modulation", "dit", "vae_decoder")
        if (model_repository / model).is_dir()
    }

    def parameter(model: str, name: str) -> int | None:
        text = configs[model].parameters[name].string_value if model in configs else ""
        return int(text) if text.isdecimal() else None

    images = parameter("tokenize", "max_images")
    rows = parameter("denoise", "max_modulation_rows")
    for needed, why, engine in (
        (images and 2 * images, f"tokenize allows max_images {images}, guided", "dit"),
        (images, f"tokenize allows max_images {images}", "vae_decoder"),
        (rows, f"denoise has max_modulation_rows {rows}", "modulation"),
    ):
        if needed and engine in configs and configs[engine].max_batch_size < needed:
            raise ServeError(
                f"{why}, which needs batches of {needed}, but {engine} has max_batch_size "
                f"{configs[engine].max_batch_size}: change one of the two config.pbtxt."
            )


def _config(folder: Path, profile: str) -> model_config_pb2.ModelConfig:
    """The configuration that Triton takes for the profile."""
    path = folder / "configs" / f"{profile}.pbtxt"
    if not path.is_file():
        path = folder / "config.pbtxt"
    try:
        text = path.read_text(encoding="utf-8")
        return text_format.Parse(text, model_config_pb2.ModelConfig())
    except (OSError, UnicodeDecodeError, text_format.ParseError) as error:
        raise ServeError(f"{path} cannot be read: {error}.") from None
