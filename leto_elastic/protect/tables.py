"""The engine without ISA-L: numpy look-ups, two bytes at a time, about twenty times slower.

A coefficient's table has 65,536 entries of two bytes, each the product of both. It is the same in either byte order.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from leto_elastic.protect.buffers import Bytes, BytesLike, operands
from leto_elastic.protect.field import PRODUCTS, Matrix

_BLOCK = 1 << 18  # bytes; numpy widens each pair to an index of 8


class TablesEngine:
    """See `leto_elastic.protect.engines.Engine`."""

    name = "tables"

    def dot(self, coefficients: Matrix, sources: Sequence[BytesLike], targets: Sequence[BytesLike]) -> None:
        inputs, outputs, length = operands(coefficients, sources, targets)
        for start in range(0, length, _BLOCK):
            block = slice(start, start + _BLOCK)
            for row, output in zip(coefficients, outputs, strict=True):
                output[block] = 0
                for coefficient, source in zip(row, inputs, strict=True):
                    _add(int(coefficient), source[block], output[block])

    def update(self, column: Matrix, source: BytesLike, targets: Sequence[BytesLike]) -> None:
        inputs, outputs, length = operands(column.reshape(-1, 1), [source], targets)
        for start in range(0, length, _BLOCK):
            block = slice(start, start + _BLOCK)
            for coefficient, output in zip(column, outputs, strict=True):
                _add(int(coefficient), inputs[0][block], output[block])


@functools.cache
def _table(coefficient: int) -> npt.NDArray[np.uint16]:
    """Products of every two bytes, (65536,) uint16; 128 KiB each, and a code uses few of the 255."""
    single = PRODUCTS[coefficient].astype(np.uint16)
    table: npt.NDArray[np.uint16] = (single[None, :] | single[:, None] << 8).reshape(-1)
    return table


def _add(coefficient: int, source: Bytes, target: Bytes) -> None:
    """target ^= coefficient * source."""
    if coefficient == 0:
        return
    if coefficient == 1:
        np.bitwise_xor(source, target, out=target)
        return
    even = source.size // 2 * 2
    pairs = target[:even].view(np.uint16)
    products = np.take(_table(coefficient), source[:even].view(np.uint16), mode="wrap")
    np.bitwise_xor(pairs, products, out=pairs)
    target[even:] ^= PRODUCTS[coefficient, source[even:]]
