"""An engine's model.safetensors: its tensors on the device, and its description."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from runtimes import EngineError

FORMAT = 1  # of the description; another one's names or shapes may differ
# Stays in the host's memory, mapped: a prompt needs a few rows of its 1.1 GB.
HOST = frozenset({"embed_tokens.weight"})


def load(
    artifact: Path, device: torch.device, page_locked: bool = False
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns tensors by name, and what the export wrote of them.

    The file is mapped, each tensor but those of `HOST` goes straight to the device. page_locked: to
    the host's memory, as one from which a GPU copies by itself, several times as fast as others.

    Raises:
        EngineError: it is cut off or was not written by this version's export.
    """
    try:
        with (
            safe_open(artifact, framework="pt", device=str(device)) as file,
            safe_open(artifact, framework="pt", device="cpu") as mapped,
        ):
            description = json.loads((file.metadata() or {}).get("description", "{}"))
            if not isinstance(description, dict) or description.get("format") != FORMAT:
                raise EngineError(
                    f"{artifact.name} has no description of format {FORMAT}: run 'make export'"
                )
            tensors = {}
            for name in file.keys():  # noqa: SIM118
                tensor = (mapped if name in HOST else file).get_tensor(name)
                tensors[name] = tensor.pin_memory() if page_locked else tensor
            return tensors, description
    except (OSError, SafetensorError, ValueError) as error:
        raise EngineError(
            f"{artifact.name} cannot be loaded ({' '.join(str(error).split())}): run 'make export'"
        ) from None
