"""What each collective does in a process that has no peers, and where its tensors are among its arguments.

A parked shadow builds and rehearses the user's model alone: every collective completes at once, with the shapes that
peers would give. Values are those that come nearest to sense: this process's own input wherever a peer's would be,
zeros where there is none (so that no uninitialised memory makes the rehearsal trip over NaN).

torch's FakeProcessGroup is not used for it: DDP's reducer asserts on its futures, which are empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch


class Place(NamedTuple):
    """Rank in the group and size of the group."""

    rank: int
    size: int


class Op(NamedTuple):
    """How many leading arguments are tensors, whether the first of them are outputs, and the loopback."""

    arguments: int
    writes: bool
    fill: Callable[[Place, list[Any]], None]


def flatten(value: Any) -> list[torch.Tensor]:
    """The tensors in a tensor, a list of tensors or a list of lists."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in flatten(item)] if isinstance(value, Iterable) else []


def leading(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The tensor arguments of a call, outputs first, whether they are passed by place or by name."""
    return [*args, *kwargs.values()][: op.arguments]


def outputs_of(op: Op, tensors: list[Any]) -> list[torch.Tensor]:
    """The output tensors of a call, flat: what the future of its work holds."""
    return flatten(tensors[0]) if op.writes else []


def _nothing(_place: Place, _tensors: list[Any]) -> None:
    pass


def _zero(_place: Place, tensors: list[Any]) -> None:
    for output in flatten(tensors[0]):
        output.zero_()


def _spread(output: torch.Tensor, value: torch.Tensor) -> None:
    if output.shape == value.shape:
        output.copy_(value)
    else:
        output.zero_()


def _gather_lists(_place: Place, tensors: list[Any]) -> None:
    outputs, inputs = tensors
    if isinstance(inputs, torch.Tensor):
        outputs, inputs = [outputs], [inputs]
    for group, value in zip(outputs, inputs, strict=False):
        for output in group:
            _spread(output, value)


def _gather_coalesced(_place: Place, tensors: list[Any]) -> None:
    for of_rank in tensors[0]:
        for output, value in zip(of_rank, tensors[1], strict=True):
            _spread(output, value)


def _gather_flat(place: Place, tensors: list[Any]) -> None:
    for output, value in zip(flatten(tensors[0]), flatten(tensors[1]), strict=True):
        output.view(place.size, -1).copy_(value.reshape(1, -1).expand(place.size, -1))


def _scatter_lists(place: Place, tensors: list[Any]) -> None:
    outputs, inputs = tensors
    if isinstance(outputs, torch.Tensor):
        outputs, inputs = [outputs], [inputs]
    if not flatten(inputs):
        _zero(place, [outputs])
        return
    for output, values in zip(outputs, inputs, strict=True):
        _spread(output, values[place.rank])


def _scatter_flat(place: Place, tensors: list[Any]) -> None:
    for output, value in zip(flatten(tensors[0]), flatten(tensors[1]), strict=True):
        output.view(-1).copy_(value.reshape(place.size, -1)[place.rank])


def _exchange_lists(_place: Place, tensors: list[Any]) -> None:
    for output, value in zip(tensors[0], tensors[1], strict=True):
        _spread(output, value)


def _exchange_flat(_place: Place, tensors: list[Any]) -> None:
    _spread(tensors[0], tensors[1])


OPS: dict[str, Op] = {
    "allreduce": Op(1, True, _nothing),
    "allreduce_coalesced": Op(1, True, _nothing),
    "broadcast": Op(1, True, _nothing),
    "reduce": Op(1, True, _nothing),
    "allgather": Op(2, True, _gather_lists),
    "allgather_coalesced": Op(2, True, _gather_coalesced),
    "_allgather_base": Op(2, True, _gather_flat),
    "all_gather_single": Op(2, True, _gather_flat),
    "allgather_into_tensor_coalesced": Op(2, True, _gather_flat),
    "all_gather_single_coalesced": Op(2, True, _gather_flat),
    "gather": Op(2, True, _gather_lists),
    "scatter": Op(2, True, _scatter_lists),
    "reduce_scatter": Op(2, True, _scatter_lists),
    "_reduce_scatter_base": Op(2, True, _scatter_flat),
    "reduce_scatter_single": Op(2, True, _scatter_flat),
    "reduce_scatter_tensor_coalesced": Op(2, True, _scatter_flat),
    "reduce_scatter_single_coalesced": Op(2, True, _scatter_flat),
    "alltoall": Op(2, True, _exchange_lists),
    "alltoall_base": Op(2, True, _exchange_flat),
    "all_to_all_single": Op(2, True, _exchange_flat),
    "send": Op(1, False, _nothing),
    "recv": Op(1, True, _zero),
    "recv_anysource": Op(1, True, _zero),
    "barrier": Op(0, False, _nothing),
    "monitored_barrier": Op(0, False, _nothing),
}
