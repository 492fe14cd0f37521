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


def load(
    artifact: Path, device: torch.device, page_locked: bool = False
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns tensors by name, and what the export wrote of them.

    The file is mapped, each tensor goes straight to the device. page_locked: to memory of the host
    from which a GPU copies by itself, several times as fast as from other memory.

    Raises:
        EngineError: it is cut off or was not written by this version's export.
    """
    try:
        with safe_open(artifact, framework="pt", device=str(device)) as file:
            description = json.loads((file.metadata() or {}).get("description", "{}"))
            if description.get("format") != FORMAT:
                raise EngineError(
                    f"{artifact.name} has no description of format {FORMAT}: run 'make export'"
                )
            tensors = {}
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(name)
                tensors[name] = tensor.pin_memory() if page_locked else tensor
            return tensors, description
    except (OSError, SafetensorError, ValueError) as error:
        raise EngineError(
            f"{artifact.name} cannot be loaded ({' '.join(str(error).split())}): run 'make export'"
        ) from None
