"""Where fault plans reach into a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from leto_elastic.state.transaction import Torn
from leto_elastic.testing.faults import Faults


def torn_point(faults: Faults, step: Callable[[], int]) -> Torn | None:
    """The hook for `phase=update`; None when no fault asks for it, so that chunks are not cut in halves for nothing."""
    if not faults.expects("update"):
        return None

    def fire(chunk: int, chunks: int) -> None:
        faults.at("update", step(), chunk, chunks)

    return fire


def arm(faults: Faults, model: nn.Module, step: int) -> Callable[[], None]:
    """Prepare `phase=backward` for this step: fires in the middle of the graph. Returns what takes it away again."""
    if not faults.expects("backward"):
        return lambda: None
    leaves = [m for m in model.modules() if next(m.children(), None) is None and next(m.parameters(), None) is not None]

    def watch(_module: nn.Module, _args: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, (tuple, list)) else output
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            tensor.register_hook(lambda _grad: faults.at("backward", step))  # type: ignore[no-untyped-call]

    handle = leaves[len(leaves) // 2].register_forward_hook(watch)
    return handle.remove
