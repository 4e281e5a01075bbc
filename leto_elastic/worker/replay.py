"""Objects that a rank broadcasts in its set-up, in the shadow of that rank.

Everybody else receives what the trainer sent (see `comm.record`). The sender's own shadow would keep the object that
*it* made: another time stamp, another random run name, pickled to another length. So during the set-up of a shadow it
receives as well. Only `broadcast_object_list` leaves the sender's own object alone; the other object collectives return
copies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


def receive_own_broadcasts() -> Callable[[], None]:
    """Replace `torch.distributed.broadcast_object_list` for a shadow's set-up. Returns what puts it back."""
    original = c10d.broadcast_object_list
    to_object: Callable[..., Any] = c10d._tensor_to_object

    def broadcast_object_list(
        object_list: list[Any],
        src: int | None = None,
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        group_src: int | None = None,
    ) -> None:
        within = group or dist.group.WORLD
        assert within is not None
        root = dist.get_group_rank(within, src or 0) if group_src is None else group_src
        if within.rank() != root:
            original(object_list, src=src, group=group, device=device, group_src=group_src)
            return
        sizes = torch.empty(len(object_list), dtype=torch.long)
        dist.broadcast(sizes, group=within, group_src=root)
        data = torch.empty(int(sizes.sum()), dtype=torch.uint8)
        dist.broadcast(data, group=within, group_src=root)
        for index, part in enumerate(torch.split(data, sizes.tolist())):
            object_list[index] = to_object(part, part.numel(), within)

    modules: tuple[Any, ...] = (dist, c10d)
    for module in modules:
        module.broadcast_object_list = broadcast_object_list

    def put_back() -> None:
        for module in modules:
            module.broadcast_object_list = original

    return put_back
