"""The random number generators of a process: torch (CPU and devices in use), numpy's global one, python's `random`."""

from __future__ import annotations

import random
import sys
from array import array
from typing import Any

import torch


def capture() -> dict[str, Any]:
    """All states, as values that `pack` takes. About 30 microseconds on a CPU."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "python": [version, array("I", words).tobytes(), gauss],
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, pos, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = [name, keys.tobytes(), int(pos), int(has_gauss), float(cached)]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = [s.numpy().tobytes() for s in torch.cuda.get_rng_state_all()]
    return state


def _bytes_tensor(raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def restore(state: dict[str, Any]) -> None:
    """Put back what `capture` returned."""
    torch.set_rng_state(_bytes_tensor(state["torch"]))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(array("I", words)), gauss))
    if "numpy" in state:
        import numpy as np

        name, keys, pos, has_gauss, cached = state["numpy"]
        np.random.set_state((name, np.frombuffer(keys, dtype=np.uint32), pos, has_gauss, cached))
    if "cuda" in state:
        torch.cuda.set_rng_state_all([_bytes_tensor(s) for s in state["cuda"]])
