"""The plain example with `torch.distributed.checkpoint` every ten steps and resumption from the newest one.

Checkpoints lie in the run directory, which all nodes share. One whose `.metadata` is missing was not finished.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import lm

EVERY = 10
KEPT = 2


def finished(directory: Path) -> list[Path]:
    """All whole checkpoints, oldest first."""
    found = (path.parent for path in directory.glob("checkpoint-*/.metadata"))
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]))


def content(model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler, step: int) -> dict[str, Any]:
    """What is saved, and the form that is loaded into."""
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "scheduler": scheduler.state_dict(), "step": step}


def main() -> None:
    args = lm.parse_args()
    dist.init_process_group()
    loader = lm.build_loader(args)
    model = lm.build_model(args)
    optimizer, scheduler = lm.build_optimizer(model, args)
    journal = lm.Journal(args)
    start = 0
    if there := finished(args.run_dir):
        state = content(model, optimizer, scheduler, 0)
        dcp.load(state, checkpoint_id=there[-1])
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        start = state["step"]

    for step in lm.steps(loader, until=args.steps, start=start):
        ids, tokens = step.batch
        journal.begin(step, ids)
        loss = lm.backward(model, tokens, args.grad_accum)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        done = step.number + 1
        if done % EVERY == 0:
            path = args.run_dir / f"checkpoint-{done}"
            dcp.save(content(model, optimizer, scheduler, done), checkpoint_id=path)
            if dist.get_rank() == 0:
                for old in finished(args.run_dir)[:-KEPT]:
                    shutil.rmtree(old)
        journal.end(step, loss)

    lm.finish(model, optimizer, journal)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
