"""Train a small language model with DDP or FSDP2 under torchrun.

`train_lm.py` and `train_lm_plain.py` are one script with and without leto_elastic: `diff -w` shows the five lines.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import lm


def main() -> None:
    args = lm.parse_args()
    dist.init_process_group()
    loader = lm.build_loader(args)
    model = lm.build_model(args)
    optimizer, scheduler = lm.build_optimizer(model, args)
    journal = lm.Journal(args)

    for step in lm.steps(loader, until=args.steps):
        ids, tokens = step.batch
        journal.begin(step, ids)
        loss = lm.backward(model, tokens, args.grad_accum)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        journal.end(step, loss)

    lm.finish(model, optimizer, journal)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
