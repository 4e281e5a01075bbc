"""A segment as torch storage, and tensors placed on it.

All tensors of one segment are views of one storage over one mapping (thousands of storages would be thousands of file
descriptors). The descriptor may be closed once the storage exists: the mapping keeps the memory.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch

from leto_elastic.state.layout import ALIGN


def aligned(offset: int) -> int:
    """The next offset at which a tensor may start, in bytes."""
    return -(-offset // ALIGN) * ALIGN


class Arena:
    """One mapped segment.

    Args:
        name: the segment's name, for messages.
        fd: its descriptor (not closed here).
        size: bytes.
    """

    def __init__(self, name: str, fd: int, size: int) -> None:
        self.name = name
        self.size = size
        self.storage: Any = torch.UntypedStorage.from_file(f"/proc/self/fd/{fd}", shared=True, nbytes=size)
        self.address = self.storage.data_ptr()

    def view(self, offset: int, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor at `offset` bytes. Raises ValueError when it would leave the segment."""
        if offset + span_bytes(shape, stride, dtype) > self.size:
            raise ValueError(
                f"segment {self.name} of {self.size} bytes has no room at {offset} for {tuple(shape)} {dtype}"
            )
        return torch.empty(0, dtype=dtype).set_(
            self.storage, offset // dtype.itemsize, torch.Size(shape), tuple(stride)
        )

    def copy_out(self, offset: int, size: int, target: Arena, target_offset: int) -> None:
        """Copy bytes to another segment (libc's memcpy: releases the GIL, no tensor is made)."""
        ctypes.memmove(target.address + target_offset, self.address + offset, size)

    def bytes(self, offset: int, size: int) -> memoryview:
        """The bytes themselves, writable."""
        return memoryview((ctypes.c_char * size).from_address(self.address + offset)).cast("B")


def rebase(tensor: torch.Tensor, view: torch.Tensor) -> None:
    """Let `tensor` be `view`: same storage, offset, shape and stride."""
    tensor.set_(view.untyped_storage(), view.storage_offset(), view.size(), view.stride())


def give_back_freed() -> None:
    """Return to the system what tensors held before they were moved; glibc would keep it for later."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's own stride when it is dense (e.g. channels last), else the contiguous one."""
    order = sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1)
    expected = 1
    for stride, size in order:
        if stride != expected:
            return tuple(torch.empty(tensor.shape, device="meta").stride())
        expected *= size
    return tuple(tensor.stride())


def span_bytes(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    if math.prod(shape) == 0:
        return 0
    return (1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))) * dtype.itemsize
