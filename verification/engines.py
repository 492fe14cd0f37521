"""Every served engine against its torch module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from quality.distances import cosine
from quality.gate import QualityError
from quality.served import Served
from verification.cases import read_cases

# The least cosine to torch that an engine must reach, by the format of its layers: for FP8, INT8
# and NVFP4 what the recipes were made to keep, for the others far below what rounding explains.
LEAST_COSINE = {
    "fp32": 0.99999,
    "bf16": 0.999,
    "int8_weights": 0.999,
    "fp8": 0.999,
    "int8": 0.999,
    "nvfp4": 0.99,
}


def compare_engines(
    served: Served, cases: Path, made: Mapping[str, Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Calls the server's engines, past the ensemble, with the inputs of `cases`.

    Args:
        cases: a file of `verification.cases`.
        made: the manifest's entry of each engine.

    Yields:
        For each case `engine`, `case`, `cosine` (the lowest of its outputs), `relative_error`
        (‖ours − torch's‖ / ‖torch's‖, the largest), `least` and `passed`.

    Raises:
        QualityError: the server refuses a call.
    """
    for case in read_cases(cases):
        names = list(case.outputs)
        results = served.infer(case.engine, case.inputs, names)
        pairs = [(results[name].astype(np.float32), case.outputs[name]) for name in names]
        for name, (ours, theirs) in zip(names, pairs, strict=True):
            if ours.shape != theirs.shape:
                raise QualityError(
                    f"{case.engine} puts out {name} {list(ours.shape)}, torch {list(theirs.shape)}"
                )
        least = min(LEAST_COSINE[kind] for kind in made[case.engine].get("layers", ("fp32",)))
        lowest = min(
            cosine(row, wanted) if np.isfinite(row).all() else 0.0
            for ours, theirs in pairs
            for row, wanted in zip(ours, theirs, strict=True)
        )
        yield {
            "engine": case.engine,
            "case": case.name,
            "cosine": lowest,
            "relative_error": max(_relative_error(ours, theirs) for ours, theirs in pairs),
            "least": least,
            "passed": lowest >= least,
        }


def _relative_error(ours: np.ndarray, theirs: np.ndarray) -> float:
    wanted = theirs.astype(np.float64)
    length = np.linalg.norm(wanted)
    return float(np.linalg.norm(ours - wanted) / length) if length else float(np.abs(ours).max())
