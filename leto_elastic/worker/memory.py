"""Which exceptions mean that memory was too short."""

from __future__ import annotations

import torch

from leto_elastic.errors import NotEnoughMemory

_SIGNS = ("can't allocate memory", "not enough memory", "Cannot allocate memory", "CUDA out of memory")
"""In torch's RuntimeErrors: its allocator on the CPU, with and without `DefaultCPUAllocator`, and errno's text."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception, or what it was raised from, tells that memory was too short, in this process.

    Python's MemoryError, torch's OutOfMemoryError of any device and the RuntimeError of its CPU allocator.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, MemoryError | NotEnoughMemory | torch.OutOfMemoryError):
            return True
        if isinstance(seen, RuntimeError) and any(sign in str(seen) for sign in _SIGNS):
            return True
        seen = seen.__cause__
    return False
