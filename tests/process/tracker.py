"""A script whose set-up depends on rank 0, and which starts a tracker once per active rank."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import leto_elastic as leto
from tests.process.train import hold


def main() -> None:
    leto.init()
    rank = dist.get_rank()
    objects = [{"name": "run-7", "pid": os.getpid()} if rank == 0 and not leto.is_shadow() else None]
    dist.broadcast_object_list(objects, 0)
    gathered: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, ("rank", rank))
    assert gathered == [("rank", r) for r in range(dist.get_world_size())]
    received = objects[0]
    assert received is not None
    was_shadow = leto.is_shadow()

    def track() -> None:
        with Path(leto.run_dir(), "tracker.txt").open("a") as file:
            file.write(f"{rank} {os.getpid()} {received['name']} {received['pid']} {leto.is_shadow()} {was_shadow}\n")

    leto.on_active(track)
    torch.manual_seed(1)
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state = leto.TrainState(model=model, optimizer=optimizer)
    for step in leto.steps(state, until=8):
        with step:
            if step.number == 3 and not step.rehearsal:
                hold(leto.run_dir(), 2)
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    print(f"name rank={rank} {received['name']} pid={os.getpid()}\n", end="", flush=True)


if __name__ == "__main__":
    main()
