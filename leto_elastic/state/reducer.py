"""DDP's reducer after an exception out of a backward pass.

It is left half-way, and refuses the next forward ("Expected to have finished reduction in the prior iteration"). torch
can reset it, and with that forgets that its buckets have been rebuilt in the order in which gradients arrive: it would
do so once more before the forward after the next backward, with a broadcast that the other ranks do not enter. The
buckets stay as they are until then. So just before that forward they are rebuilt here, by a broadcast to nobody, and
must come out as they were.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from leto_elastic.errors import StateError


class Alone(Protocol):
    """The communicators: while `loopback` is set collectives are of this process alone."""

    loopback: bool


def forget_backward(module: nn.Module, fabric: Alone) -> None:
    """Make DDP modules ready for another forward whose backward pass was left half-way.

    A later forward raises StateError when the buckets cannot be had again as they were.
    """
    for part in module.modules():
        if isinstance(part, DistributedDataParallel) and _unfinished(part.reducer):
            _Again(part, fabric)


def _unfinished(reducer: Any) -> bool:
    try:
        reducer._check_reducer_finalized()
    except RuntimeError:
        return True
    return False


class _Again:
    """Rebuilds the buckets of one module before the first forward that would do so together with others."""

    def __init__(self, ddp: DistributedDataParallel, fabric: Alone) -> None:
        self._fabric = fabric
        self._reducer: Any = ddp.reducer
        self._before = _layout(self._reducer)
        self._reducer._reset_state()
        if ddp.static_graph or not ddp.find_unused_parameters:  # else they are never rebuilt
            self._hook = ddp.register_forward_pre_hook(self._rebuild)

    def _rebuild(self, _module: nn.Module, _args: Any) -> None:
        self._fabric.loopback = True
        try:
            done = self._reducer._rebuild_buckets()
        finally:
            self._fabric.loopback = False
        if done:
            self._hook.remove()
            if _layout(self._reducer) != self._before:
                raise StateError("DDP's buckets came out otherwise than before; this rank must be replaced")


def _layout(reducer: Any) -> list[list[int]]:
    return [[id(param) for param in bucket.parameters()] for bucket in reducer._get_zeros_like_grad_buckets()]
