"""Reduce-scatter on gloo, by reductions of copies, of which each rank keeps its part.

That is how torch does it too (2.13): one all-reduce for the forms with one tensor, a reduction to each rank in turn for
the form with a list, so the bits are the same. But its handles block without regard to any timeout and never say that
they are over; a rank that an abort caught in one could stay there for half an hour (see `work`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions, ReduceOptions, ReduceScatterOptions, Work

_FLAT = frozenset({"_reduce_scatter_base", "reduce_scatter_single"})
_SEVERAL = frozenset({"reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"})
OPS = _FLAT | _SEVERAL | {"reduce_scatter"}


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
    if op == "reduce_scatter":
        return _start_list(inner, outputs, inputs, options, rank, size)
    pairs = [(outputs, inputs)] if op in _FLAT else list(zip(outputs, inputs, strict=True))
    if not pairs or not all(_fits(output, whole, size) for output, whole in pairs):
        return None
    reduce = AllreduceOptions()
    reduce.reduceOp, reduce.timeout = options.reduceOp, options.timeout
    copies = [whole.detach().flatten().clone() for _, whole in pairs]
    works = [inner.allreduce([copy], reduce) for copy in copies]

    def take() -> None:
        with torch.no_grad():
            for (output, _), copy in zip(pairs, copies, strict=True):
                output.copy_(copy.view(size, -1)[rank].view(output.shape))

    return Reduced(works[0] if len(works) == 1 else _All(works), take)


def _start_list(
    inner: dist.ProcessGroup,
    outputs: list[torch.Tensor],
    inputs: list[list[torch.Tensor]],
    options: ReduceScatterOptions,
    rank: int,
    size: int,
) -> Reduced | None:
    if len(outputs) != 1 or len(inputs) != 1 or len(inputs[0]) != size:
        return None
    output, pieces = outputs[0], inputs[0]
    if not all(_fits(output, piece, 1) for piece in pieces):
        return None
    copies = [piece.detach().clone(memory_format=torch.contiguous_format) for piece in pieces]
    works = []
    for root, copy in enumerate(copies):
        reduce = ReduceOptions()
        reduce.reduceOp, reduce.timeout, reduce.rootRank = options.reduceOp, options.timeout, root
        works.append(inner.reduce([copy], reduce))

    def take() -> None:
        with torch.no_grad():
            output.copy_(copies[rank].view(output.shape))

    return Reduced(_All(works), take)


def _fits(output: torch.Tensor, whole: torch.Tensor, size: int) -> bool:
    return output.is_cpu and whole.is_cpu and whole.dtype == output.dtype and whole.numel() == size * output.numel()
