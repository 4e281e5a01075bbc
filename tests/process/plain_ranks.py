"""A script without leto, for jobs of several nodes: rank 3 fails at the first attempt."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
ones = torch.ones(1)
dist.all_reduce(ones)
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
if attempt == "0" and dist.get_rank() == 3:
    os._exit(9)
dist.barrier()
print(f"rank {dist.get_rank()} of {ones.item():.0f} at attempt {attempt}\n", end="", flush=True)
dist.destroy_process_group()
