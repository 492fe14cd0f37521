"""What the training can be told; every field is an option of the command line."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Batches are pictures a step; rates are peak learning rates of AdamW."""

    seed: int = 0
    vae_steps: int = 5200
    vae_batch: int = 64
    vae_rate: float = 1.2e-3
    edge_weight: float = 0.5
    kl_weight: float = 1e-3
    dit_steps: int = 7400
    dit_batch: int = 1024
    dit_rate: float = 1.2e-3
    warmup: int = 500
    ema: float = 0.9995
    # Prompts replaced by " " and by the empty one: what guidance subtracts.
    drop_to_space: float = 0.08
    drop_to_empty: float = 0.03
    scenes: int = 450_000  # kept at a time; new ones replace the oldest
    first_scenes: int = 24_000  # rendered before a stage starts
    grow_every: int = 4  # steps between two looks for a new chunk of scenes
    workers: int = 0  # that render; 0: two fewer than there are cores
    compile: bool = True  # the transformers' blocks, on a GPU
