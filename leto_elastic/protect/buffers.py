"""Buffers as flat arrays of bytes, without a copy, and the check that a call's buffers fit together.

Anything with the buffer protocol will do: bytes, memoryview, mmap, numpy arrays. Torch tensors have none; they are
given as `memory_at(tensor.data_ptr(), tensor.nbytes)`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from leto_elastic.protect.field import Matrix

if TYPE_CHECKING:
    from typing_extensions import Buffer

Bytes = npt.NDArray[np.uint8]
BytesLike: TypeAlias = "Buffer | npt.NDArray[Any]"  # before Python 3.12 numpy does not say that arrays are buffers

_WRITABLE = 0x200  # PyBUF_WRITE
_from_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_from_memory.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]
_from_memory.restype = ctypes.py_object


class Operands(NamedTuple):
    """The buffers of one call, all of `length` bytes."""

    sources: list[Bytes]
    targets: list[Bytes]
    length: int


def memory_at(address: int, length: int) -> memoryview:
    """The `length` bytes at `address`, writable. Keeps nothing alive: the caller must."""
    if not length:
        return memoryview(bytearray())
    view: memoryview = _from_memory(address, length, _WRITABLE)
    return view


def flat(buffer: BytesLike) -> Bytes:
    """The buffer's bytes, (n,) uint8, sharing its memory. Raises ValueError when they are not contiguous."""
    view = memoryview(cast("Buffer", buffer))
    if not view.c_contiguous:
        raise ValueError(f"a buffer of shape {view.shape} and strides {view.strides} is not contiguous")
    return np.frombuffer(view, dtype=np.uint8)


def address_of(array: Bytes) -> int:
    """Where the array starts. Keeps nothing alive: the caller must."""
    if array.size and array.flags.writeable:  # four times as fast as numpy's way
        return ctypes.addressof(ctypes.c_char.from_buffer(cast("Buffer", array)))
    return array.ctypes.data


def operands(coefficients: Matrix, sources: Sequence[BytesLike], targets: Sequence[BytesLike]) -> Operands:
    """Check what an engine is given.

    Args:
        coefficients: (len(targets), len(sources)) uint8.
        sources: buffers to read.
        targets: buffers to write.

    Raises:
        ValueError: shape or type of the coefficients, different lengths, a read-only target.
    """
    shape = (len(targets), len(sources))
    if coefficients.shape != shape or coefficients.dtype != np.uint8:
        raise ValueError(
            f"coefficients are {coefficients.dtype} of shape {coefficients.shape}, "
            f"must be uint8 of shape {shape} (targets, sources)"
        )
    inputs, outputs = [flat(source) for source in sources], [flat(target) for target in targets]
    if not inputs:
        raise ValueError("no sources: there is nothing to compute from")
    length = inputs[0].size
    for role, arrays in (("source", inputs), ("target", outputs)):
        for number, array in enumerate(arrays):
            if array.size != length:
                raise ValueError(
                    f"{role} {number} has {array.size} bytes, source 0 has {length}: all buffers must be of one length"
                )
    for number, output in enumerate(outputs):
        if not output.flags.writeable:
            raise ValueError(f"target {number} is read-only")
    return Operands(inputs, outputs, length)
