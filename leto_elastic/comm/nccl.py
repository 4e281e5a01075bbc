"""NCCL inside an epoch's group, beside gloo for CPU tensors. Written against torch 2.13, not yet run on several GPUs.

Unlike gloo, NCCL has a working `abort()`: it ends kernels and host waits from any thread, so `GlooEpoch.sever` calls
it from the listener thread, and nothing has to be known of its sockets.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupNCCL, Store


def add(group: dist.ProcessGroup, store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroupNCCL:
    """Build the NCCL communicator of `group` and give it the CUDA tensors. Returns the backend, for its abort."""
    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    backend = ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, options)
    group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, backend)
    backend._set_sequence_number_for_group()
    return backend
