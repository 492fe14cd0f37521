"""What `bench.hopper` runs in a new process: loads a DiT's file and makes two predictions."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

STARTED = time.perf_counter()

import torch  # noqa: E402 (its import is part of what is measured)

from runtimes.safetensors import Runtime  # noqa: E402


def main() -> None:
    result = {"imports_s": time.perf_counter() - STARTED}
    runtime = Runtime(Path(sys.argv[1]), {})
    result["loaded_s"] = time.perf_counter() - STARTED
    shapes = {
        "hidden_states": (2, 4096, 64),
        "encoder_hidden_states": (2, 128, 3584),
        "text_mask": (2, 128),
        "position_ids": (2, 4224, 3),
        "block_modulation": (2, 60, 2, 18432),
        "final_modulation": (2, 6144),
    }
    batch = {spec.name: torch.ones(shapes[spec.name], device="cuda") for spec in runtime.inputs}
    for name in ("first_prediction_s", "second_prediction_s"):
        runtime.run(batch)
        torch.cuda.synchronize()
        result[name] = time.perf_counter() - STARTED
    print(json.dumps({name: round(value, 2) for name, value in result.items()}))


if __name__ == "__main__":
    main()
