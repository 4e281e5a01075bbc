"""Train a small language model with DDP or FSDP2 under torchrun.

`train_lm.py` and `train_lm_plain.py` are one script with and without leto_elastic: `diff -w` shows the five lines.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import leto_elastic as leto
import lm


def main() -> None:
    args = lm.parse_args()
    leto.init()
    loader = lm.build_loader(args)
    model = lm.build_model(args)
    optimizer, scheduler = lm.build_optimizer(model, args)
    journal = lm.Journal(args)
    state = leto.TrainState(model=model, optimizer=optimizer, scheduler=scheduler, data=loader, journal=journal)

    for step in leto.steps(state, until=args.steps):
        with step:
            ids, tokens = step.batch
            journal.begin(step, ids)
            loss = lm.backward(model, tokens, args.grad_accum)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            journal.end(step, loss)

    lm.finish(model, optimizer, journal)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
