"""The engine that is meant to be used: ISA-L through ctypes, in place, without the GIL."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence

import numpy as np

from leto_elastic.protect.buffers import BytesLike, address_of, operands
from leto_elastic.protect.field import Matrix
from leto_elastic.protect.library import Library

_TABLE_BYTES = 32  # of one coefficient, at most
_XOR_ALIGN = 64  # of addresses and length, for every kernel of xor_gen
_MAX_SPAN = 1 << 30  # ISA-L counts bytes in an int


class IsalEngine:
    """See `leto_elastic.protect.engines.Engine`.

    Args:
        library: ISA-L, as found.
    """

    name = "isal"

    def __init__(self, library: Library) -> None:
        self._functions = library.functions
        self._expanded = functools.lru_cache(maxsize=512)(self._expand)

    def dot(self, coefficients: Matrix, sources: Sequence[BytesLike], targets: Sequence[BytesLike]) -> None:
        inputs, outputs, length = operands(coefficients, sources, targets)
        if not outputs or not length:
            return
        rows, data = coefficients.shape
        key = coefficients.tobytes()
        ones = _ones(key)
        if ones and data == 1:
            for output in outputs:
                np.copyto(output, inputs[0])
            return
        from_, to = [address_of(array) for array in inputs], [address_of(array) for array in outputs]
        done = self._xor(from_, to[0], length) if ones and rows == 1 else 0
        tables = self._expanded(key, rows, data)
        for start, size in _spans(done, length):
            self._functions.ec_encode_data(size, data, rows, tables, _pointers(from_, start), _pointers(to, start))

    def update(self, column: Matrix, source: BytesLike, targets: Sequence[BytesLike]) -> None:
        inputs, outputs, length = operands(column.reshape(-1, 1), [source], targets)
        if not outputs or not length:
            return
        key = column.tobytes()
        if _ones(key):
            for output in outputs:
                np.bitwise_xor(inputs[0], output, out=output)
            return
        from_, to = address_of(inputs[0]), [address_of(output) for output in outputs]
        tables = self._expanded(key, len(outputs), 1)
        for start, size in _spans(0, length):
            self._functions.ec_encode_data_update(size, 1, len(outputs), 0, tables, from_ + start, _pointers(to, start))

    def _expand(self, coefficients: bytes, rows: int, data: int) -> ctypes.Array[ctypes.c_char]:
        """ISA-L's tables of a matrix; their form is known to this library alone."""
        tables = ctypes.create_string_buffer(_TABLE_BYTES * data * rows)
        self._functions.ec_init_tables(data, rows, coefficients, tables)
        return tables

    def _xor(self, sources: list[int], target: int, length: int) -> int:
        """XOR the sources into the target as far as the faster function can; returns the bytes done."""
        addresses = [*sources, target]
        done = min(length, _MAX_SPAN) // _XOR_ALIGN * _XOR_ALIGN
        if not done or any(address % _XOR_ALIGN for address in addresses):
            return 0
        return 0 if self._functions.xor_gen(len(addresses), done, _pointers(addresses, 0)) else done


def _ones(coefficients: bytes) -> bool:
    """Whether sums are plain XOR, for which there are faster ways than multiplying by 1."""
    return coefficients.count(1) == len(coefficients)


def _pointers(addresses: list[int], offset: int) -> ctypes.Array[ctypes.c_void_p]:
    """C's array of pointers. It keeps no buffer alive: the arrays that the addresses are of must outlive the call."""
    return (ctypes.c_void_p * len(addresses))(*[address + offset for address in addresses])


def _spans(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Offsets and sizes of the parts in which ISA-L can be called."""
    for offset in range(start, stop, _MAX_SPAN):
        yield offset, min(_MAX_SPAN, stop - offset)
