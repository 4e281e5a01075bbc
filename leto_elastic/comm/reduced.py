"""Reduce-scatter on gloo, by an all-reduce of a copy of which each rank keeps its part.

That is how torch does it too (2.13), so the bits are the same. But its handle blocks without regard to any timeout and
never says that it is over; a rank that an abort caught in it could stay there for half an hour (see `work`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions, ReduceScatterOptions, Work

_FLAT = frozenset({"_reduce_scatter_base", "reduce_scatter_single"})
_SEVERAL = frozenset({"reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"})
_LISTS = frozenset({"reduce_scatter"})
OPS = _FLAT | _SEVERAL | _LISTS


class Reduced(NamedTuple):
    """One under way: its work, and what puts each rank's part into its outputs once that is over."""

    work: Any
    take: Callable[[], None]


class _All:
    """Several works as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self, timeout: timedelta) -> bool:
        """Wait for all; raises what the first one does."""
        return all(work.wait(timeout) for work in self._works)

    def is_completed(self) -> bool:
        """Whether all are over."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Whether all have succeeded."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> Any:
        """Of the first one that has one."""
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def get_future(self) -> torch.futures.Future[Any]:
        """Complete when all are."""
        return torch.futures.collect_all([work.get_future() for work in self._works])


def start(
    inner: dist.ProcessGroup, op: str, args: tuple[Any, ...], kwargs: dict[str, Any], rank: int, size: int
) -> Reduced | None:
    """Begin one of `OPS`. None: a form of call that is left to torch, errors in it included.

    Args:
        inner: over gloo.
        op: name of the method.
        args, kwargs: of the call.
        rank, size: of this process in the group, and of the group.
    """
    if kwargs or len(args) != 3 or not isinstance(args[2], ReduceScatterOptions):
        return None
    outputs, inputs, options = args
    pairs = _pairs(op, outputs, inputs)
    for output, pieces in pairs:
        if not output.is_cpu or sum(piece.numel() for piece in pieces) != size * output.numel():
            return None
        if any(piece.dtype != output.dtype or not piece.is_cpu for piece in pieces):
            return None
        if len(pieces) > 1 and any(piece.numel() != output.numel() for piece in pieces):
            return None
    if not pairs:
        return None
    reduce = AllreduceOptions()
    reduce.reduceOp, reduce.timeout = options.reduceOp, options.timeout
    with torch.no_grad():
        copies = [torch.cat([piece.reshape(-1) for piece in pieces]) for _, pieces in pairs]
    works = [inner.allreduce([copy], reduce) for copy in copies]

    def take() -> None:
        with torch.no_grad():
            for (output, _), copy in zip(pairs, copies, strict=True):
                output.copy_(copy.view(size, -1)[rank].view(output.shape))

    return Reduced(works[0] if len(works) == 1 else _All(works), take)


def _pairs(op: str, outputs: Any, inputs: Any) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Each output with the pieces of its input."""
    if op in _FLAT:
        return [(outputs, [inputs])]
    if op in _SEVERAL:
        return [(output, [whole]) for output, whole in zip(outputs, inputs, strict=True)]
    return list(zip(outputs, inputs, strict=True))
