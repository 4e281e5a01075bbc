"""Which ranks hold an equal stream on purpose, so that a lost one is copied from another instead of being decoded.

Taken from how the model is wrapped: DDP makes every parameter equal in its group; a DTensor is equal along the mesh
dimensions with a `Replicate` placement (HSDP's first one) and different along the others; a parameter that nobody
wraps is this rank's own as soon as there are others. The stream is as equal as its least equal parameter.

Rejected: to compare contents. Equal today is not equal by construction, and zeros are equal to zeros.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel


def replicas(module: nn.Module, params: Iterable[torch.Tensor], rank: int) -> list[int]:
    """The global ranks whose `params` are equal to this rank's, itself included, in ascending order."""
    synced = _synced(module)
    equal: set[int] | None = None
    for param in params:
        own = _of_mesh(param, rank) if isinstance(param, DTensor) else synced.get(id(param), {rank})
        equal = own if equal is None else equal & own
    return sorted((equal or set()) | {rank})


def _synced(module: nn.Module) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for part in module.modules():
        if isinstance(part, DistributedDataParallel):
            ranks = set(dist.get_process_group_ranks(part.process_group))
            for name, param in part.module.named_parameters():
                if name not in part.parameters_to_ignore:
                    found[id(param)] = ranks
    return found


def _of_mesh(param: DTensor, rank: int) -> set[int]:
    mesh = param.device_mesh
    place = mesh.get_coordinate()
    if place is None:
        return {rank}
    index = tuple(
        slice(None) if isinstance(placement, Replicate) else at
        for placement, at in zip(param.placements, place, strict=True)
    )
    return set(mesh.mesh[index].reshape(-1).tolist())
