"""The plain example (DDP) with `torch.save` every ten steps and resumption: what torchrun users have today."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist

import lm

EVERY = 10


def main() -> None:
    args = lm.parse_args()
    dist.init_process_group()
    loader = lm.build_loader(args)
    model = lm.build_model(args)
    optimizer, scheduler = lm.build_optimizer(model, args)
    journal = lm.Journal(args)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    path = args.run_dir / "checkpoint.pt"
    start = 0
    if path.exists():
        saved = torch.load(path)
        start = saved.pop("step")
        for name, part in parts.items():
            part.load_state_dict(saved[name])

    for step in lm.steps(loader, until=args.steps, start=start):
        ids, tokens = step.batch
        journal.begin(step, ids)
        loss = lm.backward(model, tokens, args.grad_accum)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if (step.number + 1) % EVERY == 0 and dist.get_rank() == 0:
            states = itertools.chain([("step", step.number + 1)], ((n, p.state_dict()) for n, p in parts.items()))
            torch.save(dict(states), path.with_suffix(".new"))
            path.with_suffix(".new").rename(path)
        journal.end(step, loss)

    lm.finish(model, optimizer, journal)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
